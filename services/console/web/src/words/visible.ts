// Text that strangers wrote, made safe to look at. It is never HTML: components put it on the page as text.

// Controls but newline and tab, and what changes the direction of text or is not seen (Unicode TR 36, "Trojan Source").
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

/** Maximum length of a text that a component shows at once, characters. */
export const SHOWN_CHARACTERS = 20_000;

/** Returns a text with its hidden characters made visible: `␀` for controls, `⟨202E⟩` for marks of direction. */
export function visible(text: string): string {
  return text.replace(HIDDEN, (character) => {
    const code = character.codePointAt(0) ?? 0;
    if (code === 0x7f) return "␡";
    return code < 0x20 ? String.fromCodePoint(0x2400 + code) : `⟨${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

/** Returns the beginning of a text, and how many characters are left out. */
export function cut(text: string, limit = SHOWN_CHARACTERS): { text: string; left: number } {
  if (text.length <= limit) return { text: visible(text), left: 0 };
  const isSplit = (text.charCodeAt(limit - 1) & 0xfc00) === 0xd800;
  const end = isSplit ? limit - 1 : limit;
  return { text: visible(text.slice(0, end)), left: text.length - end };
}

/** Returns a text on one line, of at most `limit` characters. */
export function line(text: string, limit = 200): string {
  const found = cut(
    text
      .slice(0, limit * 4)
      .replace(/\s+/g, " ")
      .trim(),
    limit,
  );
  return found.left || text.length > limit * 4 ? `${found.text}…` : found.text;
}
