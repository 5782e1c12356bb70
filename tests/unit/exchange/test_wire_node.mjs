// Decodes exchanged gradients as docs/exchange-wire.md says, with the .proto files and nothing of Fulmen.
//
//   node test_wire_node.mjs < payloads
//
// Reads a line of JSON for each payload: {payload: hexadecimal, codec, version, size, bits}; prints one for each:
// {decoded: [[place, value], ...]} of what is not zero, or {refused: why}.

import path from "node:path";
import readline from "node:readline";
import { fileURLToPath } from "node:url";

import protobuf from "protobufjs";

const PROTOS = path.resolve(path.dirname(fileURLToPath(import.meta.url)), "../../../protos");
const BLOCK = 4096;
const SCALED = 512;
const MOST_PARTS = 8;

class Refused extends Error {}

function need(holds, why) {
  if (!holds) throw new Refused(why);
}

async function headerType() {
  const root = new protobuf.Root();
  root.resolvePath = (_, target) => path.resolve(PROTOS, target);
  await root.load("fulmen/algorithm/v1/gradient_exchange.proto", { keepCase: true });
  return root.lookupType("fulmen.algorithm.v1.PayloadHeader");
}

/** ISO-HDLC: polynomial 0xEDB88320, reflected, begun and ended with all ones. */
function crc32(bytes) {
  let crc = ~0;
  for (const byte of bytes) {
    crc ^= byte;
    for (let bit = 0; bit < 8; ++bit) crc = crc & 1 ? (crc >>> 1) ^ 0xedb88320 : crc >>> 1;
  }
  return ~crc >>> 0;
}

function float32Of(bits) {
  const view = new DataView(new ArrayBuffer(4));
  view.setUint32(0, bits);
  return view.getFloat32(0);
}

function float16Of(bits) {
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  const sign = bits >> 15 ? -1 : 1;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24);
}

const KINDS = {
  KIND_INT8: { bytes: 1, read: (view, at) => view.getInt8(at) },
  KIND_UINT8: { bytes: 1, read: (view, at) => view.getUint8(at) },
  KIND_INT16: { bytes: 2, read: (view, at) => view.getInt16(at, true) },
  KIND_BFLOAT16: { bytes: 2, read: (view, at) => float32Of((view.getUint16(at, true) << 16) >>> 0) },
  KIND_FLOAT32: { bytes: 4, read: (view, at) => view.getFloat32(at, true) },
  KIND_FLOAT16: { bytes: 2, read: (view, at) => float16Of(view.getUint16(at, true)) },
};

/** Reads the frame: header and parts, each with its kind and numbers. */
function parse(type, data) {
  need(data.length >= 12 && data.toString("latin1", 0, 4) === "FGX1", "no payload of this format");
  need(crc32(data.subarray(8)) === data.readUInt32LE(4), "checksum");
  let at = 12 + data.readUInt32LE(8);
  need(at <= data.length, "the header is cut off");
  let header;
  try {
    header = type.toObject(type.decode(data.subarray(12, at)), { enums: String, longs: Number, defaults: true });
  } catch (error) {
    throw new Refused(`the header cannot be read: ${error.message}`);
  }
  need(header.parts.length <= MOST_PARTS && header.element_count >= 0, "too many parts, or elements below zero");
  const view = new DataView(data.buffer, data.byteOffset, data.length);
  const parts = header.parts.map(({ kind, count }) => {
    const known = KINDS[kind];
    need(known && count >= 0 && at + count * known.bytes <= data.length, "a part is of no kind, or cut off");
    const numbers = Array.from({ length: count }, (_, i) => known.read(view, at + i * known.bytes));
    at += count * known.bytes;
    return { kind, numbers };
  });
  need(at === data.length, "there is more than the parts");
  return { codec: header.codec, version: header.codec_version, size: header.element_count, parts };
}

/** Returns the numbers of parts of these kinds, all of them finite. */
function numbersOf(parts, ...kinds) {
  need(parts.map((part) => part.kind).join() === kinds.join(), "number or kinds of the parts");
  need(parts.every((part) => part.numbers.every(Number.isFinite)), "a number is not finite");
  return parts.map((part) => part.numbers);
}

/** Returns integers of so many bits: themselves, or planes of bits. */
function integers(packed, bits, count) {
  need(packed.length === (bits === 8 ? count : Math.ceil(count / 8) * bits), "number of integers");
  if (bits === 8) return packed;
  return Array.from({ length: count }, (_, element) => {
    let whole = 0;
    for (let bit = 0; bit < bits; ++bit) {
      whole |= ((packed[Math.floor(element / 8) * bits + bit] >> (element % 8)) & 1) << bit;
    }
    return whole >= 1 << (bits - 1) ? whole - (1 << bits) : whole;
  });
}

/** Returns the elements that counts and places name, in order. */
function elements(counts, places, size) {
  need(counts.length === Math.ceil(size / BLOCK), "number of counts");
  need(counts.every((count) => count >= 0 && count <= BLOCK), "a count is out of range");
  need(counts.reduce((sum, count) => sum + count, 0) === places.length, "counts do not fit the places");
  let next = 0;
  return counts.flatMap((count, block) => {
    let last = -1;
    return places.slice(next, (next += count)).map((place) => {
      need(place > last && place < Math.min(BLOCK, size - block * BLOCK), "a place is not there, or not in order");
      last = place;
      return block * BLOCK + place;
    });
  });
}

const whole = (size, values) => {
  need(values.length === size, "number of values");
  return values.map((value, place) => [place, value]);
};

function dense({ size, parts }) {
  const kinds = ["KIND_FLOAT32", "KIND_BFLOAT16", "KIND_FLOAT16"];
  need(parts.length === 1 && kinds.includes(parts[0].kind), "number or kinds of the parts");
  return whole(size, numbersOf(parts, parts[0].kind)[0]);
}

function sparse({ size, parts }) {
  const [counts, places, values] = numbersOf(parts, "KIND_INT16", "KIND_INT16", "KIND_BFLOAT16");
  need(values.length === places.length, "number of values");
  return elements(counts, places, size).map((element, i) => [element, values[i]]);
}

function quantised({ size, parts }, bits) {
  if (parts.length === 1) return whole(size, numbersOf(parts, "KIND_FLOAT32")[0]);
  const [packed, scales] = numbersOf(parts, bits === 8 ? "KIND_INT8" : "KIND_UINT8", "KIND_FLOAT32");
  need(scales.length === Math.ceil(size / SCALED) && scales.every((scale) => scale >= 0), "scales");
  const steps = integers(packed, bits, size);
  return steps.map((step, place) => [place, Math.fround(step * scales[Math.floor(place / SCALED)])]);
}

function sparseQuantised(payload, bits) {
  const { size, parts } = payload;
  if (parts.length === 3) return sparse(payload);
  const kind = bits === 8 ? "KIND_INT8" : "KIND_UINT8";
  const [counts, places, packed, scales] = numbersOf(parts, "KIND_INT16", "KIND_INT16", kind, "KIND_BFLOAT16");
  const where = elements(counts, places, size);
  const steps = integers(packed, bits, places.length);
  const filled = counts.flatMap((count, block) => (count ? [block] : []));
  need(scales.length === filled.length && scales.every((scale) => scale > 0), "scales");
  const scaleOf = new Map(filled.map((block, i) => [block, scales[i]]));
  return where.map((element, i) => {
    const step = steps[i] + (steps[i] >= 0 ? 1 : 0);
    return [element, Math.fround(step * scaleOf.get(Math.floor(element / BLOCK)))];
  });
}

const DECODERS = {
  sum: dense,
  topk: sparse,
  dgc: sparse,
  qsgd: quantised,
  double_quantization: quantised,
  topk_quantised: sparseQuantised,
};

function answer(type, { payload, codec, version, size, bits }) {
  try {
    const found = parse(type, Buffer.from(payload, "hex"));
    need(found.codec === codec && found.version === version, "another codec, or version");
    need(found.size === size, "another number of elements");
    return { decoded: DECODERS[codec](found, bits).filter(([, value]) => value !== 0) };
  } catch (error) {
    if (error instanceof Refused) return { refused: error.message };
    throw error;
  }
}

const type = await headerType();
for await (const line of readline.createInterface({ input: process.stdin })) {
  console.log(JSON.stringify(answer(type, JSON.parse(line))));
}
