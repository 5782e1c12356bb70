// Decodes exchanged gradients as described in docs/exchange-wire.md.

import { PayloadHeader, PayloadPart_Kind as Kind } from "../build/gen/fulmen/algorithm/v1/gradient_exchange.js";

const BLOCK = 4096;
const SCALED = 512;
const MOST_PARTS = 8;

/** An invalid payload; no part of it may be used. */
export class Refused extends Error {}

function need(holds: boolean, why: string): asserts holds {
  if (!holds) throw new Refused(why);
}

interface Part {
  kind: Kind;
  numbers: number[];
}

interface Payload {
  size: number;
  parts: Part[];
}

/** The place and value of an element that is not zero. */
export type Element = [place: number, value: number];

/** What the reader knows beforehand; a payload that differs is refused. */
export interface Expected {
  codec: string;
  version: number;
  size: number;
  bits: number;
}

export function decode(data: Buffer, { codec, version, size, bits }: Expected): Element[] {
  const { header, payload } = parse(data);
  need(header.codec === codec && header.codecVersion === version, "another codec, or version");
  need(payload.size === size, "another number of elements");
  return DECODERS[codec](payload, bits).filter(([, value]) => value !== 0);
}

/** ISO-HDLC: polynomial 0xEDB88320, reflected, initial value and final XOR are all ones. */
function crc32(bytes: Buffer) {
  let crc = ~0;
  for (const byte of bytes) {
    crc ^= byte;
    for (let bit = 0; bit < 8; ++bit) crc = crc & 1 ? (crc >>> 1) ^ 0xedb88320 : crc >>> 1;
  }
  return ~crc >>> 0;
}

function float32Of(bits: number) {
  const view = new DataView(new ArrayBuffer(4));
  view.setUint32(0, bits);
  return view.getFloat32(0);
}

function float16Of(bits: number) {
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  const sign = bits >> 15 ? -1 : 1;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24);
}

const READERS: Partial<Record<Kind, { bytes: number; read: (data: Buffer, at: number) => number }>> = {
  [Kind.KIND_INT8]: { bytes: 1, read: (data, at) => data.readInt8(at) },
  [Kind.KIND_UINT8]: { bytes: 1, read: (data, at) => data.readUInt8(at) },
  [Kind.KIND_INT16]: { bytes: 2, read: (data, at) => data.readInt16LE(at) },
  [Kind.KIND_BFLOAT16]: { bytes: 2, read: (data, at) => float32Of((data.readUInt16LE(at) << 16) >>> 0) },
  [Kind.KIND_FLOAT16]: { bytes: 2, read: (data, at) => float16Of(data.readUInt16LE(at)) },
  [Kind.KIND_FLOAT32]: { bytes: 4, read: (data, at) => data.readFloatLE(at) },
};

/** Reads the frame: header and parts, each with its kind and numbers. */
function parse(data: Buffer) {
  need(data.length >= 12 && data.toString("latin1", 0, 4) === "FGX1", "no payload of this format");
  need(crc32(data.subarray(8)) === data.readUInt32LE(4), "checksum");
  let at = 12 + data.readUInt32LE(8);
  need(at <= data.length, "the header is cut off");
  const header = headerOf(data.subarray(12, at));
  need(header.parts.length <= MOST_PARTS && header.elementCount >= 0n, "too many parts, or elements below zero");
  const parts = header.parts.map(({ kind, count: long }) => {
    const count = Number(long);
    const reader = READERS[kind];
    need(!!reader && count >= 0 && at + count * reader.bytes <= data.length, "a part has an unknown kind, or cut off");
    const numbers = Array.from({ length: count }, (_, i) => reader.read(data, at + i * reader.bytes));
    at += count * reader.bytes;
    return { kind, numbers };
  });
  need(at === data.length, "there is more than the parts");
  return { header, payload: { size: Number(header.elementCount), parts } };
}

function headerOf(data: Buffer) {
  try {
    return PayloadHeader.decode(data);
  } catch (error) {
    throw new Refused(`the header cannot be read: ${error}`);
  }
}

/** Returns the numbers of parts of these kinds, all of them finite. */
function numbersOf(parts: Part[], ...kinds: Kind[]) {
  need(parts.map((part) => part.kind).join() === kinds.join(), "number or kinds of the parts");
  need(parts.every((part) => part.numbers.every(Number.isFinite)), "a number is not finite");
  return parts.map((part) => part.numbers);
}

/** Returns integers of this many bits: plain, or as planes of bits. */
function integers(packed: number[], bits: number, count: number) {
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

/** Returns the elements that the counts and places describe, in order. */
function elements(counts: number[], places: number[], size: number) {
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

/** Reads an unencoded tensor of any kind of number. Only its numbers need not be finite. */
function whole({ size, parts }: Payload): Element[] {
  need(parts.length === 1 && parts[0].numbers.length === size, "number of the parts, or of values");
  return parts[0].numbers.map((value, place) => [place, value]);
}

/** Reads the sum of the ranks' payloads: without places if these would take more bytes. */
function union(payload: Payload): Element[] {
  if (payload.parts.length !== 1) return sparse(payload);
  numbersOf(payload.parts, Kind.KIND_BFLOAT16);
  return whole(payload);
}

function sparse({ size, parts }: Payload): Element[] {
  const [counts, places, values] = numbersOf(parts, Kind.KIND_INT16, Kind.KIND_INT16, Kind.KIND_BFLOAT16);
  need(values.length === places.length, "number of values");
  return elements(counts, places, size).map((element, i) => [element, values[i]]);
}

function quantised(payload: Payload, bits: number): Element[] {
  const { size, parts } = payload;
  if (parts.length === 1) {
    numbersOf(parts, Kind.KIND_FLOAT32);
    return whole(payload);
  }
  const [packed, scales] = numbersOf(parts, bits === 8 ? Kind.KIND_INT8 : Kind.KIND_UINT8, Kind.KIND_FLOAT32);
  const most = 1 << (bits - 1);
  need(scales.length === Math.ceil(size / SCALED), "number of scales");
  need(scales.every((scale) => scale >= 0 && Number.isFinite(Math.fround(scale * most))), "scales");
  const scaleOf = (place: number) => scales[Math.floor(place / SCALED)];
  return integers(packed, bits, size).map((step, place) => [place, Math.fround(step * scaleOf(place))]);
}

function sparseQuantised(payload: Payload, bits: number): Element[] {
  const { size, parts } = payload;
  if (parts.length === 3) return sparse(payload);
  const kind = bits === 8 ? Kind.KIND_INT8 : Kind.KIND_UINT8;
  const [counts, places, packed, scales] = numbersOf(parts, Kind.KIND_INT16, Kind.KIND_INT16, kind, Kind.KIND_BFLOAT16);
  const where = elements(counts, places, size);
  const steps = integers(packed, bits, places.length);
  const filled = counts.flatMap((count, block) => (count ? [block] : []));
  const most = 1 << (bits - 1);
  need(scales.length === filled.length, "number of scales");
  need(scales.every((scale) => scale > 0 && Number.isFinite(Math.fround(scale * most))), "scales");
  const scaleOf = new Map(filled.map((block, i) => [block, scales[i]]));
  return where.map((element, i) => {
    const step = steps[i] + (steps[i] >= 0 ? 1 : 0); // no element that is sent is zero
    return [element, Math.fround(step * scaleOf.get(Math.floor(element / BLOCK))!)];
  });
}

const DECODERS: Record<string, (payload: Payload, bits: number) => Element[]> = {
  // Servers send this if tensors are not encoded.
  sum: whole,
  topk: sparse,
  dgc: sparse,
  union,
  qsgd: quantised,
  double_quantization: quantised,
  topk_quantised: sparseQuantised,
};
