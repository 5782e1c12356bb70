// The loops of reference.py on one thread of a CPU, with the same bits. They are compiled where they run (loader.py).
//
// Every operation rounds as torch's does: products and sums are not contracted (-ffp-contract=off), and divisions stay
// divisions.
// Magnitudes are compared as integers, which vectorises: floats without their sign are ordered as their bits are.
// The interface is plain C: the library works with every torch and Python and does not need the C++ runtime.
// Pointers never overlap.

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define FULMEN_FOLDS __attribute__((target("pclmul,sse4.1")))
#endif

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words of marks and of planes are read as little-endian"
#endif

namespace {

constexpr int64_t kBlock = 4096;
constexpr uint32_t kMagnitude = 0x7fffffffu;
constexpr uint32_t kInfinity = 0x7f800000u;
constexpr int64_t kLine = 16;    // elements that come from memory together
constexpr int64_t kChunk = 512;  // elements that are rounded or unpacked at a time; they stay in the nearest cache

uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// To nearest, ties to even; never called with NaN.
uint16_t to_bfloat16(float value) {
  const uint32_t bits = bits_of(value);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

float from_bfloat16(uint16_t value) { return float_of(static_cast<uint32_t>(value) << 16); }

// Marks elements to select: magnitudes from `smallest` to infinity, zeros never.
struct Range {
  uint32_t smallest;
  uint32_t width;

  explicit Range(float threshold) : smallest(threshold > 0.0f ? bits_of(threshold) : 1u), width(kInfinity - smallest) {}

  uint8_t holds(float value) const { return ((bits_of(value) & kMagnitude) - smallest) <= width; }
};

void feed(const float* __restrict gradient, float* __restrict residual, int64_t size, Range range,
          uint8_t* __restrict marks) {
  for (int64_t i = 0; i < size; ++i) {
    const float sum = residual[i] + gradient[i];
    residual[i] = sum;
    marks[i] = range.holds(sum);
  }
}

void mark(const float* __restrict values, int64_t size, Range range, uint8_t* __restrict marks) {
  for (int64_t i = 0; i < size; ++i) marks[i] = range.holds(values[i]);
}

void correct(const float* __restrict gradient, float* __restrict velocity, float* __restrict accumulated, int64_t size,
             float momentum, Range range, uint8_t* __restrict marks) {
  for (int64_t i = 0; i < size; ++i) {
    const float u = velocity[i] * momentum + gradient[i];
    const float v = accumulated[i] + u;
    velocity[i] = u;
    accumulated[i] = v;
    marks[i] = range.holds(v);
  }
}

void correct_nesterov(const float* __restrict gradient, float* __restrict velocity, float* __restrict accumulated,
                      int64_t size, float momentum, Range range, uint8_t* __restrict marks) {
  for (int64_t i = 0; i < size; ++i) {
    const float u = (velocity[i] + gradient[i]) * momentum;
    const float v = (accumulated[i] + u) + gradient[i];
    velocity[i] = u;
    accumulated[i] = v;
    marks[i] = range.holds(v);
  }
}

// Output of selected elements.
struct Taken {
  int16_t* counts;
  int16_t* indices;
  uint16_t* values;
  int64_t size = 0;

  // Copies the marked elements of a block of `from`. With `kMoves` only their rounding errors stay there, and those of
  // `masked`, if any, become zero. Prefetches the next block of the streams meanwhile; past the last block this does
  // nothing.
  template <bool kMoves, int kStreams>
  void take(const uint8_t* marks, float* from, float* masked, const float* const (&streams)[kStreams]) {
    const int64_t before = size;
    for (int64_t line = 0; line < kBlock; line += kLine) {
      for (const float* stream : streams) __builtin_prefetch(stream + kBlock + line);
      uint64_t words[2];
      memcpy(words, marks + line, sizeof words);
      if (!(words[0] | words[1])) continue;
      for (int half = 0; half < 2; ++half) {
        for (uint64_t word = words[half]; word; word &= word - 1) {
          const int64_t i = line + 8 * half + (__builtin_ctzll(word) >> 3);
          const uint16_t value = to_bfloat16(from[i]);
          indices[size] = static_cast<int16_t>(i);
          values[size++] = value;
          if (kMoves) from[i] -= from_bfloat16(value);
          if (kMoves && masked) masked[i] = 0.0f;
        }
      }
    }
    *counts++ = static_cast<int16_t>(size - before);
  }
};

// Uniform in [0, 1), from an index and a seed; `uniform` of the reference.
float drawn(uint32_t place, uint32_t low, uint32_t high) {
  uint32_t x = (place ^ low) * 0x9E3779B1u + high;
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  x = x ^ (x >> 16);
  return static_cast<float>(static_cast<int32_t>(x >> 8)) * 0x1p-24f;
}

void round_chunk(const float* __restrict values, int32_t size, float step, float levels, uint32_t begin, uint32_t low,
                 uint32_t high, int8_t* __restrict whole) {
  for (int32_t i = 0; i < size; ++i) {
    float rounded = floor(values[i] / step + drawn(begin + static_cast<uint32_t>(i), low, high));
    rounded = rounded < -levels ? -levels : rounded;
    rounded = rounded > levels ? levels : rounded;
    whole[i] = static_cast<int8_t>(static_cast<int32_t>(rounded));
  }
}

// To nearest, ties to even: the default rounding mode.
void nearest_chunk(const float* __restrict values, int32_t size, float step, float levels, int8_t* __restrict whole) {
  for (int32_t i = 0; i < size; ++i) {
    float rounded = __builtin_rintf(values[i] / step);
    rounded = rounded < -levels ? -levels : rounded;
    rounded = rounded > levels ? levels : rounded;
    whole[i] = static_cast<int8_t>(static_cast<int32_t>(rounded));
  }
}

float largest(const float* values, int64_t size) {
  uint32_t found = 0;
  for (int64_t i = 0; i < size; ++i) {
    const uint32_t magnitude = bits_of(values[i]) & kMagnitude;
    found = magnitude > found ? magnitude : found;
  }
  return float_of(found);
}

// Bit j of byte i becomes bit i of byte j (Warren, Hacker's Delight, section 7-3): 8 integers of 8 bits become the 8
// planes of their bits, and planes become integers.
uint64_t transposed(uint64_t word) {
  uint64_t swapped = (word ^ (word >> 7)) & 0x00aa00aa00aa00aau;
  word ^= swapped ^ (swapped << 7);
  swapped = (word ^ (word >> 14)) & 0x0000cccc0000ccccu;
  word ^= swapped ^ (swapped << 14);
  swapped = (word ^ (word >> 28)) & 0x00000000f0f0f0f0u;
  return word ^ swapped ^ (swapped << 28);
}

// Packs groups of 8 integers, at most a chunk and one group of them: their lowest `bits` planes. In several loops, of
// which those that compute vectorise.
uint8_t* pack(const int8_t* whole, int64_t groups, int bits, uint8_t* packed) {
  uint64_t words[kChunk / 8 + 1];
  uint8_t planes[kChunk + 16];
  memcpy(words, whole, static_cast<size_t>(8 * groups));
  for (int64_t group = 0; group < groups; ++group) words[group] = transposed(words[group]);
  // The next group overwrites planes beyond the lowest.
  for (int64_t group = 0; group < groups; ++group) memcpy(planes + group * bits, words + group, 8);
  memcpy(packed, planes, static_cast<size_t>(groups * bits));
  return packed + groups * bits;
}

// Unpacks groups of 8 integers, at most a chunk of them.
void unpack(const uint8_t* packed, int64_t groups, int bits, int8_t* whole) {
  uint64_t words[kChunk / 8];
  uint8_t planes[kChunk + 8] = {};
  memcpy(planes, packed, static_cast<size_t>(groups * bits));
  for (int64_t group = 0; group < groups; ++group) memcpy(words + group, planes + group * bits, 8);
  const uint64_t own = (uint64_t{1} << (8 * bits)) - 1;
  for (int64_t group = 0; group < groups; ++group) words[group] = transposed(words[group] & own);
  memcpy(whole, words, static_cast<size_t>(8 * groups));
  // From two's complement of `bits` bits to that of 8.
  const int sign = 1 << (bits - 1);
  for (int64_t i = 0; i < 8 * groups; ++i) whole[i] = static_cast<int8_t>((whole[i] ^ sign) - sign);
}

void add_scaled(const int8_t* __restrict whole, int64_t size, float scale, float* __restrict out) {
  for (int64_t i = 0; i < size; ++i) out[i] += static_cast<float>(whole[i]) * scale;
}

int64_t smaller(int64_t one, int64_t other) { return one < other ? one : other; }

// Rounds blocks to integers, chunk by chunk as `round` does, and packs them.
template <typename Round>
void quantise(const float* values, int64_t size, int32_t bits, int64_t block, uint8_t* packed, float* scales,
              Round round) {
  const float levels = static_cast<float>((1 << (bits - 1)) - 1);
  alignas(64) int8_t pending[kChunk + 8];  // before the next chunk at most 7 wait for the rest of their group
  int64_t waiting = 0;
  for (int64_t left = 0; left < size; left += block) {
    const int64_t right = smaller(left + block, size);
    const float scale = largest(values + left, right - left) / levels;
    const float step = scale > 0.0f ? scale : 1.0f;
    *scales++ = scale;
    for (int64_t at = left; at < right; at += kChunk) {
      const int64_t length = smaller(kChunk, right - at);
      for (int64_t i = 0; i < kChunk; i += kLine) __builtin_prefetch(values + at + kChunk + i);
      int8_t* whole = bits == 8 ? reinterpret_cast<int8_t*>(packed) + at : pending + waiting;
      round(at, static_cast<int32_t>(length), step, whole);
      if (bits == 8) continue;
      waiting += length;
      packed = pack(pending, waiting / 8, bits, packed);
      memmove(pending, pending + waiting / 8 * 8, static_cast<size_t>(waiting % 8));
      waiting %= 8;
    }
  }
  if (waiting) {
    memset(pending + waiting, 0, static_cast<size_t>(8 - waiting));
    pack(pending, 1, bits, packed);
  }
}

uint32_t checksum_of(const uint8_t* bytes, int64_t size, uint32_t state) {
  for (int64_t i = 0; i < size; ++i) {
    state ^= bytes[i];
    for (int bit = 0; bit < 8; ++bit) state = state >> 1 ^ (state & 1 ? 0xedb88320u : 0u);
  }
  return state;
}

#if defined(__x86_64__)
// Multiplies 16 bytes by the power of x whose remainders are in `by`, and adds `there`.
FULMEN_FOLDS inline __m128i folded(__m128i state, __m128i by, __m128i there) {
  const __m128i low = _mm_clmulepi64_si128(state, by, 0x00), high = _mm_clmulepi64_si128(state, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), there);
}

// CRC-32 by folding (Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ", Intel, 2009); the
// constants are x^(4*128+32), x^(4*128-32), x^(128+32) and x^(128-32) modulo its polynomial, their bits reversed.
FULMEN_FOLDS uint32_t folded_checksum(const uint8_t* bytes, int64_t size, uint32_t state) {
  if (size < 64) return checksum_of(bytes, size, state);
  const __m128i by_four = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
  const __m128i by_one = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  const __m128i* at = reinterpret_cast<const __m128i*>(bytes);
  const __m128i* end = at + size / 16;
  __m128i four[4];
  for (int i = 0; i < 4; ++i) four[i] = _mm_loadu_si128(at++);
  four[0] = _mm_xor_si128(four[0], _mm_cvtsi32_si128(static_cast<int>(state)));
  for (; end - at >= 4; at += 4) {
    for (int i = 0; i < 4; ++i) four[i] = folded(four[i], by_four, _mm_loadu_si128(at + i));
  }
  __m128i one = four[0];
  for (int i = 1; i < 4; ++i) one = folded(one, by_one, four[i]);
  for (; at < end; ++at) one = folded(one, by_one, _mm_loadu_si128(at));
  alignas(16) uint8_t left[16];
  _mm_store_si128(reinterpret_cast<__m128i*>(left), one);
  return checksum_of(bytes + size / 16 * 16, size % 16, checksum_of(left, 16, 0));
}
#endif

}  // namespace

extern "C" {

// Returns the magnitude that exactly `keep` of the elements reach, ties aside: digit by digit, from the highest.
float fulmen_threshold_of(const float* values, int64_t size, int64_t keep) {
  static const int kShifts[] = {20, 9, 0};
  static const uint32_t kDigits[] = {0x7ffu, 0x7ffu, 0x1ffu};
  uint32_t prefix = 0, known = 0;
  for (int digit = 0; digit < 3; ++digit) {
    int64_t counts[0x800] = {};
    for (int64_t i = 0; i < size; ++i) {
      const uint32_t magnitude = bits_of(values[i]) & kMagnitude;
      if ((magnitude & known) == prefix) ++counts[(magnitude >> kShifts[digit]) & kDigits[digit]];
    }
    uint32_t found = kDigits[digit];
    for (; found > 0 && keep > counts[found]; --found) keep -= counts[found];
    prefix |= found << kShifts[digit];
    known |= kDigits[digit] << kShifts[digit];
  }
  return float_of(prefix);
}

// Returns the number of selected elements. `indices` and `values` have room for all elements, `counts` for all blocks.
int64_t fulmen_feedback_select(const float* gradient, float* residual, int64_t size, float threshold, int16_t* counts,
                               int16_t* indices, uint16_t* values) {
  alignas(64) uint8_t marks[kBlock] = {};
  Taken taken{counts, indices, values};
  for (int64_t begin = 0; begin < size; begin += kBlock) {
    const int64_t length = smaller(kBlock, size - begin);
    memset(marks + length, 0, static_cast<size_t>(kBlock - length));
    feed(gradient + begin, residual + begin, length, Range(threshold), marks);
    taken.take<true>(marks, residual + begin, nullptr, {gradient + begin, residual + begin});
  }
  return taken.size;
}

// As above.
int64_t fulmen_dgc_select(const float* gradient, float* velocity, float* accumulated, int64_t size, float momentum,
                          int32_t nesterov, float threshold, int16_t* counts, int16_t* indices, uint16_t* values) {
  alignas(64) uint8_t marks[kBlock] = {};
  Taken taken{counts, indices, values};
  const auto step = nesterov ? correct_nesterov : correct;
  for (int64_t begin = 0; begin < size; begin += kBlock) {
    const int64_t length = smaller(kBlock, size - begin);
    memset(marks + length, 0, static_cast<size_t>(kBlock - length));
    step(gradient + begin, velocity + begin, accumulated + begin, length, momentum, Range(threshold), marks);
    taken.take<true>(marks, accumulated + begin, velocity + begin,
               {gradient + begin, velocity + begin, accumulated + begin});
  }
  return taken.size;
}

// As above; `from` is not changed.
int64_t fulmen_nonzero_select(float* from, int64_t size, int16_t* counts, int16_t* indices, uint16_t* values) {
  alignas(64) uint8_t marks[kBlock] = {};
  Taken taken{counts, indices, values};
  for (int64_t begin = 0; begin < size; begin += kBlock) {
    const int64_t length = smaller(kBlock, size - begin);
    memset(marks + length, 0, static_cast<size_t>(kBlock - length));
    mark(from + begin, length, Range(0.0f), marks);
    taken.take<false>(marks, from + begin, nullptr, {from + begin});
  }
  return taken.size;
}

// Only the gradient and `out` may be the same memory.
void fulmen_correct(const float* gradient, float* __restrict velocity, int64_t size, float momentum, int32_t nesterov,
                    float* out) {
  if (nesterov) {
    for (int64_t i = 0; i < size; ++i) {
      const float u = (velocity[i] + gradient[i]) * momentum;
      velocity[i] = u;
      out[i] = gradient[i] + u;
    }
  } else {
    for (int64_t i = 0; i < size; ++i) {
      const float u = velocity[i] * momentum + gradient[i];
      velocity[i] = u;
      out[i] = u;
    }
  }
}

// Returns 0, or -1 without adding anything if indices are out of range or not ascending: payloads are untrusted.
int32_t fulmen_add_sparse(const int16_t* counts, int64_t blocks, const int16_t* indices, const uint16_t* values,
                          int64_t taken, float* out, int64_t size) {
  int64_t at = 0;
  for (int64_t block = 0; block < blocks; ++block) {
    if (counts[block] < 0 || counts[block] > taken - at) return -1;
    const int64_t room = smaller(kBlock, size - block * kBlock);
    int64_t last = -1;
    for (const int64_t end = at + counts[block]; at < end; ++at) {
      if (indices[at] <= last || indices[at] >= room) return -1;
      last = indices[at];
    }
  }
  if (at != taken) return -1;
  at = 0;
  for (int64_t block = 0; block < blocks; ++block, out += kBlock) {
    for (const int64_t end = at + counts[block]; at < end; ++at) out[indices[at]] += from_bfloat16(values[at]);
  }
  return 0;
}

void fulmen_quantise(const float* values, int64_t size, int32_t bits, int64_t block, uint32_t begin, uint32_t low,
                     uint32_t high, uint8_t* packed, float* scales) {
  const float levels = static_cast<float>((1 << (bits - 1)) - 1);
  quantise(values, size, bits, block, packed, scales, [=](int64_t at, int32_t length, float step, int8_t* whole) {
    round_chunk(values + at, length, step, levels, begin + static_cast<uint32_t>(at), low, high, whole);
  });
}

void fulmen_nearest(const float* values, int64_t size, int32_t bits, int64_t block, uint8_t* packed, float* scales) {
  const float levels = static_cast<float>((1 << (bits - 1)) - 1);
  quantise(values, size, bits, block, packed, scales, [=](int64_t at, int32_t length, float step, int8_t* whole) {
    nearest_chunk(values + at, length, step, levels, whole);
  });
}

void fulmen_add_quantised(const uint8_t* packed, const float* scales, float* out, int64_t size, int32_t bits,
                          int64_t block) {
  alignas(64) int8_t unpacked[kChunk];
  for (int64_t left = 0; left < size; left += kChunk) {
    const int64_t right = smaller(left + kChunk, size);
    const int8_t* whole = reinterpret_cast<const int8_t*>(packed) + left;
    if (bits != 8) {
      unpack(packed + left / 8 * bits, (right - left + 7) / 8, bits, unpacked);
      whole = unpacked;
    }
    for (int64_t at = left; at < right;) {
      const int64_t end = smaller((at / block + 1) * block, right);
      add_scaled(whole + (at - left), end - at, scales[at / block], out + at);
      at = end;
    }
  }
}

// Returns whether this processor has a faster checksum than zlib's.
int32_t fulmen_checks_quickly() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
#else
  return 0;
#endif
}

// Returns the CRC-32 (ISO-HDLC, as in zlib) of bytes that follow those with checksum `value`.
uint32_t fulmen_checksum(const uint8_t* bytes, int64_t size, uint32_t value) {
#if defined(__x86_64__)
  return ~folded_checksum(bytes, size, ~value);
#else
  return ~checksum_of(bytes, size, ~value);
#endif
}
}
