// Entries of the audit log in words.

/** Texts of the fields that name a request's object, such as `names projects/a/rollouts/1 + 3 more`. */
export function requestWords(json: string): string {
  let asked: unknown;
  try {
    asked = JSON.parse(json || "{}");
  } catch {
    return json;
  }
  if (typeof asked !== "object" || asked === null) return "";
  return Object.entries(asked)
    .map(([path, value]) => [path.split(".").at(-1) ?? path, valueWords(value)] as const)
    .filter(([, value]) => value)
    .map(([field, value]) => `${field.replaceAll("_", " ")} ${ofEnum(field, value)}`)
    .join(", ");
}

/** `TOKEN_ROLE_READER` of the field `role` is `reader`; other values stay as they are. */
function ofEnum(field: string, value: string): string {
  const prefix = `${field.toUpperCase()}_`;
  const at = /^[A-Z][A-Z0-9_]*$/.test(value) ? value.indexOf(prefix) : -1;
  return at < 0
    ? value
    : value
        .slice(at + prefix.length)
        .toLowerCase()
        .replaceAll("_", " ");
}

function valueWords(value: unknown): string {
  if (!Array.isArray(value)) return value === "" || value === null ? "" : String(value);
  const known = value.filter((each) => each !== "");
  if (known.length === 0) return "";
  return known.length === 1 ? String(known[0]) : `${String(known[0])} + ${known.length - 1} more`;
}

/** Start of the last days; undefined for all time. */
export function sinceDays(days: string, now: Date): Date | undefined {
  const number = Number(days);
  return number > 0 ? new Date(now.getTime() - number * 86_400_000) : undefined;
}
