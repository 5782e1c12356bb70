#include "payload.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>

#include "fulmen/algorithm/v1/gradient_exchange.pb.h"

namespace {

using fulmen::algorithm::v1::PayloadHeader;
using fulmen::algorithm::v1::PayloadPart;
using Numbers = std::vector<float>;  // every number of a payload is exact as a float

constexpr int kBlock = 4096;
constexpr int kScaled = 512;
constexpr int kMostParts = 8;
constexpr size_t kFrameBytes = 12;
constexpr std::string_view kAsTheyAre = "sum";  // the codec's name for tensors that are not encoded

static_assert(std::endian::native == std::endian::little, "numbers are copied as they are");

void Need(bool holds, const char* why) {
  if (!holds) throw Refused(why);
}

int Blocks(int count, int size) { return (count + size - 1) / size; }

template <class T>
T As(const char* data) {
  T value;
  std::memcpy(&value, data, sizeof value);
  return value;
}

// ISO-HDLC: polynomial 0xEDB88320, reflected, initial value and final XOR are all ones.
uint32_t Crc32(std::string_view bytes) {
  uint32_t crc = ~0u;
  for (const unsigned char byte : bytes) {
    crc ^= byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? (crc >> 1) ^ 0xEDB88320u : crc >> 1;
  }
  return ~crc;
}

size_t BytesOf(PayloadPart::Kind kind) {
  switch (kind) {
    case PayloadPart::KIND_INT8:
    case PayloadPart::KIND_UINT8:
      return 1;
    case PayloadPart::KIND_INT16:
    case PayloadPart::KIND_BFLOAT16:
    case PayloadPart::KIND_FLOAT16:
      return 2;
    case PayloadPart::KIND_FLOAT32:
      return 4;
    default:
      throw Refused("a part has an unknown kind");
  }
}

// Reads binary16 of IEEE 754.
float Float16(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  float value = std::ldexp(1024.0f + static_cast<float>(fraction), exponent - 25);
  if (exponent == 0) value = std::ldexp(static_cast<float>(fraction), -24);
  if (exponent == 31) value = fraction == 0 ? std::numeric_limits<float>::infinity() : NAN;
  return bits >> 15 ? -value : value;
}

float Number(PayloadPart::Kind kind, const char* data) {
  switch (kind) {
    case PayloadPart::KIND_INT8:
      return As<int8_t>(data);
    case PayloadPart::KIND_UINT8:
      return As<uint8_t>(data);
    case PayloadPart::KIND_INT16:
      return As<int16_t>(data);
    case PayloadPart::KIND_BFLOAT16:
      return std::bit_cast<float>(static_cast<uint32_t>(As<uint16_t>(data)) << 16);
    case PayloadPart::KIND_FLOAT16:
      return Float16(As<uint16_t>(data));
    default:
      return As<float>(data);
  }
}

class Payload {
 public:
  // Reads the frame: header and parts, each with its kind and numbers.
  Payload(std::string_view data, const Expected& expected) : size_(expected.size), bits_(expected.bits) {
    Need(data.size() >= kFrameBytes && data.starts_with("FGX1"), "no payload of this format");
    Need(Crc32(data.substr(8)) == As<uint32_t>(&data[4]), "checksum");
    const auto length = As<uint32_t>(&data[8]);
    data.remove_prefix(kFrameBytes);
    Need(length <= data.size() && header_.ParseFromArray(data.data(), static_cast<int>(length)), "the header");
    Need(header_.codec() == expected.codec && header_.codec_version() == expected.version, "another codec, or version");
    Need(header_.element_count() == expected.size && header_.parts_size() <= kMostParts, "elements, or parts");
    data.remove_prefix(length);
    for (const auto& part : header_.parts()) {
      const auto bytes = BytesOf(part.kind());
      Need(part.count() >= 0 && static_cast<size_t>(part.count()) <= data.size() / bytes, "a part is cut off");
      auto& numbers = parts_.emplace_back();
      for (int64_t i = 0; i < part.count(); ++i) {
        numbers.push_back(Number(part.kind(), &data[i * bytes]));
        Need(std::isfinite(numbers.back()) || expected.codec == kAsTheyAre, "a number is not finite");
      }
      data.remove_prefix(part.count() * bytes);
    }
    Need(data.empty(), "there is more than the parts");
  }

  // Returns an unencoded tensor of any kind of number. Only its numbers need not be finite.
  Numbers Whole() const {
    Need(parts_.size() == 1 && parts_[0].size() == static_cast<size_t>(size_), "number of the parts, or of values");
    return parts_[0];
  }

  // Reads the sum of the ranks' payloads: without places if these would take more bytes.
  Numbers Union() const {
    if (parts_.size() != 1) return Sparse();
    NeedKinds({PayloadPart::KIND_BFLOAT16});
    return Whole();
  }

  Numbers Sparse() const {
    NeedKinds({PayloadPart::KIND_INT16, PayloadPart::KIND_INT16, PayloadPart::KIND_BFLOAT16});
    const auto where = Elements(parts_[0], parts_[1]);
    Need(parts_[2].size() == where.size(), "number of values");
    Numbers found(size_);
    for (size_t i = 0; i < where.size(); ++i) found[where[i]] = parts_[2][i];
    return found;
  }

  Numbers Quantised() const {
    if (parts_.size() == 1) {
      NeedKinds({PayloadPart::KIND_FLOAT32});
      return Whole();
    }
    NeedKinds({PackedKind(), PayloadPart::KIND_FLOAT32});
    const auto steps = Integers(parts_[0], size_);
    const auto& scales = parts_[1];
    Need(scales.size() == static_cast<size_t>(Blocks(size_, kScaled)), "number of scales");
    NeedScales(scales, 0);
    Numbers found(size_);
    for (int i = 0; i < size_; ++i) found[i] = static_cast<float>(steps[i]) * scales[i / kScaled];
    return found;
  }

  Numbers SparseQuantised() const {
    if (parts_.size() == 3) return Sparse();
    NeedKinds({PayloadPart::KIND_INT16, PayloadPart::KIND_INT16, PackedKind(), PayloadPart::KIND_BFLOAT16});
    const auto where = Elements(parts_[0], parts_[1]);
    const auto steps = Integers(parts_[2], static_cast<int>(where.size()));
    const auto& scales = parts_[3];
    NeedScales(scales, std::numeric_limits<float>::denorm_min());
    Numbers found(size_);
    size_t next = 0, scale = 0;
    for (const auto count : parts_[0]) {
      if (count == 0) continue;
      Need(scale < scales.size(), "number of scales");
      for (const size_t end = next + static_cast<size_t>(count); next < end; ++next) {
        const int step = steps[next] >= 0 ? steps[next] + 1 : steps[next];  // no element that is sent is zero
        found[where[next]] = static_cast<float>(step) * scales[scale];
      }
      ++scale;
    }
    Need(scale == scales.size(), "number of scales");
    return found;
  }

 private:
  void NeedKinds(std::initializer_list<PayloadPart::Kind> kinds) const {
    Need(parts_.size() == kinds.size(), "number of the parts");
    int index = 0;
    for (const auto kind : kinds) Need(header_.parts(index++).kind() == kind, "kinds of the parts");
  }

  void NeedScales(const Numbers& scales, float least) const {
    const auto most = static_cast<float>(1 << (bits_ - 1));
    for (const auto scale : scales) Need(scale >= least && std::isfinite(scale * most), "scales");
  }

  PayloadPart::Kind PackedKind() const { return bits_ == 8 ? PayloadPart::KIND_INT8 : PayloadPart::KIND_UINT8; }

  // Reads integers: plain, or as planes of bits.
  std::vector<int> Integers(const Numbers& packed, int count) const {
    Need(packed.size() == static_cast<size_t>(bits_ == 8 ? count : Blocks(count, 8) * bits_), "number of integers");
    if (bits_ == 8) return {packed.begin(), packed.end()};
    std::vector<int> integers(count);
    for (int i = 0; i < count; ++i) {
      for (int bit = 0; bit < bits_; ++bit) {
        integers[i] |= (static_cast<int>(packed[i / 8 * bits_ + bit]) >> (i % 8) & 1) << bit;
      }
      if (integers[i] >= 1 << (bits_ - 1)) integers[i] -= 1 << bits_;
    }
    return integers;
  }

  // Returns the elements that the counts and places describe, in order.
  std::vector<int> Elements(const Numbers& counts, const Numbers& places) const {
    Need(counts.size() == static_cast<size_t>(Blocks(size_, kBlock)), "number of counts");
    std::vector<int> elements;
    auto place = places.begin();
    for (int first = 0; const auto count : counts) {
      Need(count >= 0 && count <= kBlock && count <= static_cast<float>(places.end() - place), "a count");
      int last = -1;
      for (const auto end = place + static_cast<int>(count); place != end; ++place) {
        const int here = static_cast<int>(*place);
        Need(here > last && here < std::min(kBlock, size_ - first), "a place is not there, or not in order");
        elements.push_back(first + here);
        last = here;
      }
      first += kBlock;
    }
    Need(place == places.end(), "counts do not fit the places");
    return elements;
  }

  int size_;
  int bits_;
  PayloadHeader header_;
  std::vector<Numbers> parts_;
};

}  // namespace

std::vector<float> Decode(std::string_view data, const Expected& expected) {
  const Payload payload(data, expected);
  const auto& codec = expected.codec;
  if (codec == kAsTheyAre) return payload.Whole();
  if (codec == "topk" || codec == "dgc") return payload.Sparse();
  if (codec == "union") return payload.Union();
  if (codec == "qsgd" || codec == "double_quantization") return payload.Quantised();
  if (codec == "topk_quantised") return payload.SparseQuantised();
  throw std::invalid_argument("unknown codec: " + codec);
}
