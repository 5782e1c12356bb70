// The sampled tokens of a model call: ids, probabilities, versions and texts.

import type { ModelCallRecord } from "../../../api/gen/fulmen/type/v1/model_call_pb";
import { visible } from "../../../words/visible";

export interface Token {
  id: number;
  /** Natural logarithm; undefined where the backend reported none. */
  logprob?: number;
  /** Policy version that sampled it; undefined if unknown. */
  version?: number;
}

/** What is shown at once: a token, or several that are parts of one character. */
export interface Cell {
  text: string;
  tokens: Token[];
  /** Index of the first token. */
  at: number;
}

const ENTRY_BYTES = 4;
// The longest character of UTF-8 has four bytes; of more tokens than that, something is broken.
const MAX_JOINED = 4;
const strict = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/** Returns the sampled tokens of a call; none if they were not recorded. */
export function tokensOf(call: ModelCallRecord): Token[] {
  const ids = view(call.completionTokenIds);
  const logprobs = view(call.completionLogprobs);
  const tokens: Token[] = [];
  for (let at = 0; at < ids.byteLength; at += ENTRY_BYTES) {
    tokens.push({
      id: ids.getInt32(at, true),
      logprob: at + ENTRY_BYTES <= logprobs.byteLength ? logprobs.getFloat32(at, true) : undefined,
    });
  }
  for (const { version, start, end } of call.policyVersions) {
    if (version === 0n) continue;
    for (let at = Math.max(0, start); at < Math.min(end, tokens.length); at++) tokens[at]!.version = Number(version);
  }
  return tokens;
}

/** Returns tokens with their texts. Without recorded texts, a token is shown by its id. */
export function cellsOf(call: ModelCallRecord): Cell[] {
  const tokens = tokensOf(call);
  const sizes = call.completionTokenSizes;
  if (sizes.length !== tokens.length || !tokens.length) {
    return tokens.map((token, at) => ({ text: `⟨${token.id}⟩`, tokens: [token], at }));
  }
  const cells: Cell[] = [];
  let first = 0;
  let from = 0;
  let to = 0;
  tokens.forEach((_, at) => {
    to += sizes[at]!;
    const bytes = call.completionTokenText.subarray(from, to);
    const joined = tokens.slice(first, at + 1);
    if (missing(bytes) && joined.length < MAX_JOINED && at < tokens.length - 1) return;
    cells.push({ text: readable(bytes), tokens: joined, at: first });
    [first, from] = [at + 1, to];
  });
  return cells;
}

/** Returns how many bytes a text lacks at its end to be whole characters. */
function missing(bytes: Uint8Array): number {
  for (let back = 1; back <= Math.min(3, bytes.length); back++) {
    const byte = bytes[bytes.length - back]!;
    if (byte < 0x80) return 0;
    if (byte > 0xf4) return 0; // never in UTF-8
    if (byte >= 0xc0) {
      const length = byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : 2;
      return Math.max(0, length - back);
    }
  }
  return 0;
}

/** Returns bytes as text; those that are no text in hexadecimal. */
function readable(bytes: Uint8Array): string {
  try {
    return visible(strict.decode(bytes));
  } catch {
    return [...bytes]
      .map((byte) =>
        byte >= 0x20 && byte < 0x7f
          ? String.fromCharCode(byte)
          : `⟨${byte.toString(16).toUpperCase().padStart(2, "0")}⟩`,
      )
      .join("");
  }
}

function view(bytes: Uint8Array): DataView {
  const whole = bytes.byteLength - (bytes.byteLength % ENTRY_BYTES);
  return new DataView(bytes.buffer, bytes.byteOffset, whole);
}

/** Steps of probability, for colours: 0 is sure, 4 a surprise. */
export function surprise(logprob: number | undefined): 0 | 1 | 2 | 3 | 4 {
  if (logprob === undefined) return 0;
  const probability = Math.exp(logprob);
  return probability >= 0.9 ? 0 : probability >= 0.5 ? 1 : probability >= 0.1 ? 2 : probability >= 0.01 ? 3 : 4;
}

/** Why the tokens of a call are trained on, or not. */
export function training(call: ModelCallRecord, isTrain: boolean): { isTrained: boolean; why: string } {
  if (!call.policy) return { isTrained: false, why: "the model is no policy that is trained" };
  if (!call.usable) return { isTrained: false, why: `the record is not usable: ${call.unusableReason}` };
  if (!isTrain) return { isTrained: false, why: "rollouts of this mode are not trained on" };
  return { isTrained: true, why: "sampled by the policy, in a usable record" };
}
