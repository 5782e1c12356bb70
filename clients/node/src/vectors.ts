// Checks the decoder of payloads against a file of protos/testdata/exchange.

import { isDeepStrictEqual } from "node:util";

import { decode, Refused, type Element, type Expected } from "./payload.js";

interface Settings {
  codec: string;
  settings: { bits?: number; bits_up?: number; bits_down?: number };
  way: "up" | "down";
}

interface GoldenFile {
  codec: string;
  version: number;
  cases: Record<string, Settings & { payload: string; decoded: Element[]; cuts: number[]; segment: number }>;
  refused: Settings & { size: number; payloads: Record<string, string> };
}

/** Decodes everything in the file; throws at the first payload whose result differs from the file. */
export function check(text: string) {
  const { codec, version, cases, refused } = JSON.parse(text) as GoldenFile;
  const expected = ({ codec, settings, way }: Settings, size: number): Expected => ({
    codec,
    version,
    size,
    bits: settings.bits ?? (way === "up" ? settings.bits_up : settings.bits_down) ?? 0,
  });
  for (const [name, { payload, decoded, cuts, segment, ...rest }] of Object.entries(cases)) {
    const found = decode(Buffer.from(payload, "hex"), expected(rest, cuts[segment + 1] - cuts[segment]));
    if (!isDeepStrictEqual(found, decoded)) throw new Error(`${codec}: ${name}: the elements differ from the file`);
  }
  for (const [why, payload] of Object.entries(refused.payloads)) {
    if (!isRefused(payload, expected(refused, refused.size))) throw new Error(`${codec}: not refused: ${why}`);
  }
  return { codec, decoded: Object.keys(cases).length, refused: Object.keys(refused.payloads).length };
}

function isRefused(payload: string, expected: Expected) {
  try {
    decode(Buffer.from(payload, "hex"), expected);
    return false;
  } catch (error) {
    if (error instanceof Refused) return true;
    throw error;
  }
}
