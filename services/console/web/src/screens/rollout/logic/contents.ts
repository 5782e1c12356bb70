// Inputs and results as text.

const PRETTY_BELOW = 200_000;

/** Returns how many characters the first lines of a text have, at most `limit`. */
export function beginning(text: string, lines: number, limit: number): number {
  let at = -1;
  for (let n = 0; n < lines; n++) {
    at = text.indexOf("\n", at + 1);
    if (at < 0 || at >= limit) return limit;
  }
  return at;
}

/** Returns content as text: JSON indented, other text as it is, and bytes that are no text as their number. */
export function contentText(content: Uint8Array, contentType: string): string {
  let text: string;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(content);
  } catch {
    return `${content.length} bytes that are no text`;
  }
  if (!contentType.includes("json") || text.length > PRETTY_BELOW) return text;
  try {
    const value: unknown = JSON.parse(text);
    return typeof value === "object" && value !== null ? JSON.stringify(value, null, 2) : text;
  } catch {
    return text;
  }
}

/** Returns content as it is written into a command or a form; undefined if it is no text. */
export function plainText(content: Uint8Array): string | undefined {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(content);
  } catch {
    return undefined;
  }
}
