package dev.fulmen.client;

import com.google.protobuf.InvalidProtocolBufferException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.zip.CRC32;
import stubs.fulmen.algorithm.v1.PayloadHeader;
import stubs.fulmen.algorithm.v1.PayloadPart.Kind;

/** Decodes exchanged gradients as described in docs/exchange-wire.md. */
final class Payload {
  private static final byte[] MAGIC = {'F', 'G', 'X', '1'};
  private static final int BLOCK = 4096;
  private static final int SCALED = 512;
  private static final int MOST_PARTS = 8;
  private static final String AS_THEY_ARE = "sum"; // the codec's name for tensors that are not encoded

  /** An invalid payload; no part of it may be used. */
  static final class Refused extends RuntimeException {
    Refused(String why) {
      super(why);
    }
  }

  /** What the reader knows beforehand; a payload that differs is refused. */
  record Expected(String codec, int version, int size, int bits) {}

  private record Part(Kind kind, float[] numbers) {}

  private final int size;
  private final List<Part> parts = new ArrayList<>();

  /** Returns the elements of a segment. Every number of a payload is exact as a float. */
  static float[] decode(byte[] data, Expected expected) {
    need(data.length >= 12 && Arrays.equals(data, 0, 4, MAGIC, 0, 4), "no payload of this format");
    var payload = new Payload(ByteBuffer.wrap(data).order(ByteOrder.LITTLE_ENDIAN), expected);
    return switch (expected.codec) {
      case AS_THEY_ARE -> payload.whole();
      case "topk", "dgc" -> payload.sparse();
      case "union" -> payload.union();
      case "qsgd", "double_quantization" -> payload.quantised(expected.bits);
      case "topk_quantised" -> payload.sparseQuantised(expected.bits);
      default -> throw new IllegalArgumentException("unknown codec: " + expected.codec);
    };
  }

  /** Reads the frame: header and parts, each with its kind and numbers. */
  private Payload(ByteBuffer data, Expected expected) {
    var checksum = new CRC32();
    checksum.update(data.duplicate().position(8));
    need((int) checksum.getValue() == data.getInt(4), "checksum");
    data.position(12);
    var length = data.getInt(8);
    need(0 <= length && length <= data.remaining(), "the header is cut off");
    var header = header(data.slice(12, length));
    need(header.getCodec().equals(expected.codec) && header.getCodecVersion() == expected.version, "another codec");
    need(header.getElementCount() == expected.size && header.getPartsCount() <= MOST_PARTS, "elements, or parts");
    size = expected.size;
    data.position(12 + length);
    for (var part : header.getPartsList()) {
      var bytes = bytesOf(part.getKind());
      need(part.getCount() >= 0 && part.getCount() <= data.remaining() / bytes, "a part is cut off");
      var numbers = new float[(int) part.getCount()];
      for (int i = 0; i < numbers.length; i++) {
        numbers[i] = number(part.getKind(), data);
        need(Float.isFinite(numbers[i]) || expected.codec.equals(AS_THEY_ARE), "a number is not finite");
      }
      parts.add(new Part(part.getKind(), numbers));
    }
    need(!data.hasRemaining(), "there is more than the parts");
  }

  private static PayloadHeader header(ByteBuffer data) {
    try {
      return PayloadHeader.parseFrom(data);
    } catch (InvalidProtocolBufferException unreadable) {
      throw new Refused("the header cannot be read");
    }
  }

  private static int bytesOf(Kind kind) {
    return switch (kind) {
      case KIND_INT8, KIND_UINT8 -> 1;
      case KIND_INT16, KIND_BFLOAT16, KIND_FLOAT16 -> 2;
      case KIND_FLOAT32 -> 4;
      default -> throw new Refused("a part has an unknown kind");
    };
  }

  private static float number(Kind kind, ByteBuffer data) {
    return switch (kind) {
      case KIND_INT8 -> data.get();
      case KIND_UINT8 -> data.get() & 0xff;
      case KIND_INT16 -> data.getShort();
      case KIND_BFLOAT16 -> Float.intBitsToFloat(data.getShort() << 16);
      case KIND_FLOAT16 -> float16(data.getShort());
      default -> data.getFloat();
    };
  }

  /** Reads binary16 of IEEE 754. */
  private static float float16(short bits) {
    var exponent = bits >> 10 & 31;
    var fraction = bits & 1023;
    var value =
        switch (exponent) {
          case 0 -> Math.scalb((float) fraction, -24);
          case 31 -> fraction == 0 ? Float.POSITIVE_INFINITY : Float.NaN;
          default -> Math.scalb(1024f + fraction, exponent - 25);
        };
    return bits < 0 ? -value : value;
  }

  private void needKinds(Kind... kinds) {
    need(parts.stream().map(Part::kind).toList().equals(List.of(kinds)), "number or kinds of the parts");
  }

  private static Kind packedKind(int bits) {
    return bits == 8 ? Kind.KIND_INT8 : Kind.KIND_UINT8;
  }

  private float[] part(int index) {
    return parts.get(index).numbers;
  }

  /** Reads integers of this many bits: plain, or as planes of bits. */
  private static int[] integers(float[] packed, int bits, int count) {
    need(packed.length == (bits == 8 ? count : blocks(count, 8) * bits), "number of integers");
    var integers = new int[count];
    for (int i = 0; i < count; i++) {
      if (bits == 8) {
        integers[i] = (int) packed[i];
        continue;
      }
      for (int bit = 0; bit < bits; bit++) integers[i] |= ((int) packed[i / 8 * bits + bit] >> (i % 8) & 1) << bit;
      if (integers[i] >= 1 << (bits - 1)) integers[i] -= 1 << bits;
    }
    return integers;
  }

  /** Returns the elements that the counts and places describe, in order. */
  private int[] elements(float[] counts, float[] places) {
    need(counts.length == blocks(size, BLOCK), "number of counts");
    var elements = new int[places.length];
    int next = 0;
    for (int block = 0; block < counts.length; block++) {
      need(counts[block] >= 0 && counts[block] <= BLOCK && next + counts[block] <= places.length, "a count");
      for (int last = -1, end = next + (int) counts[block]; next < end; next++) {
        var place = (int) places[next];
        need(place > last && place < Math.min(BLOCK, size - block * BLOCK), "a place is not there, or not in order");
        elements[next] = block * BLOCK + place;
        last = place;
      }
    }
    need(next == places.length, "counts do not fit the places");
    return elements;
  }

  /** Returns an unencoded tensor of any kind of number. Only its numbers need not be finite. */
  private float[] whole() {
    need(parts.size() == 1 && part(0).length == size, "number of the parts, or of values");
    return part(0);
  }

  /** Reads the sum of the ranks' payloads: without places if these would take more bytes. */
  private float[] union() {
    if (parts.size() != 1) return sparse();
    needKinds(Kind.KIND_BFLOAT16);
    return whole();
  }

  private float[] sparse() {
    needKinds(Kind.KIND_INT16, Kind.KIND_INT16, Kind.KIND_BFLOAT16);
    var where = elements(part(0), part(1));
    need(part(2).length == where.length, "number of values");
    var found = new float[size];
    for (int i = 0; i < where.length; i++) found[where[i]] = part(2)[i];
    return found;
  }

  private float[] quantised(int bits) {
    if (parts.size() == 1) {
      needKinds(Kind.KIND_FLOAT32);
      return whole();
    }
    needKinds(packedKind(bits), Kind.KIND_FLOAT32);
    var scales = part(1);
    need(scales.length == blocks(size, SCALED), "number of scales");
    needScales(scales, bits, 0);
    var steps = integers(part(0), bits, size);
    var found = new float[size];
    for (int i = 0; i < size; i++) found[i] = steps[i] * scales[i / SCALED];
    return found;
  }

  private float[] sparseQuantised(int bits) {
    if (parts.size() == 3) return sparse();
    needKinds(Kind.KIND_INT16, Kind.KIND_INT16, packedKind(bits), Kind.KIND_BFLOAT16);
    var counts = part(0);
    var scales = part(3);
    var where = elements(counts, part(1));
    var steps = integers(part(2), bits, where.length);
    var filled = 0;
    for (var count : counts) filled += count > 0 ? 1 : 0;
    need(scales.length == filled, "number of scales");
    needScales(scales, bits, Float.MIN_VALUE);
    var found = new float[size];
    int next = 0;
    int scale = 0;
    for (var count : counts) {
      for (int end = next + (int) count; next < end; next++) {
        var step = steps[next] >= 0 ? steps[next] + 1 : steps[next]; // no element that is sent is zero
        found[where[next]] = step * scales[scale];
      }
      if (count > 0) scale++;
    }
    return found;
  }

  private static void needScales(float[] scales, int bits, float least) {
    for (var scale : scales) need(scale >= least && Float.isFinite(scale * (1 << (bits - 1))), "scales");
  }

  private static int blocks(int count, int size) {
    return (count + size - 1) / size;
  }

  private static void need(boolean holds, String why) {
    if (!holds) throw new Refused(why);
  }
}
