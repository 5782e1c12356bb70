// Tasks and demonstrations in words.

/** A message of a demonstration or an input. */
export interface Message {
  role: string;
  text: string;
}

/** Returns the messages of a line, if it has some; content that is no text is JSON. */
export function messagesOf(value: unknown): Message[] | undefined {
  const messages = isObject(value) ? value.messages : Array.isArray(value) ? value : undefined;
  if (!Array.isArray(messages) || !messages.length) return undefined;
  if (!messages.every((each) => isObject(each) && typeof each.role === "string")) return undefined;
  return messages.map((each: Record<string, unknown>) => ({
    role: String(each.role),
    text: textOf(each.content ?? each.tool_calls),
  }));
}

/** A text as it is, a list of text parts joined, and anything else as indented JSON. */
export function textOf(value: unknown): string {
  if (typeof value === "string") return value;
  if (Array.isArray(value) && value.length && value.every((part) => isObject(part) && typeof part.text === "string"))
    return value.map((part: Record<string, unknown>) => String(part.text)).join("\n");
  return value === undefined ? "" : JSON.stringify(value, null, 2);
}

/** Returns JSON as a value; text that is none stays text. */
export function parsed(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

/** What is shown of a line in a list: the input of a task, the last message of a demonstration. */
export function previewOf(text: string): string {
  const value = parsed(text);
  const messages = messagesOf(value);
  if (messages) return messages.at(-1)?.text ?? "";
  if (isObject(value) && "input" in value)
    return typeof value.input === "string" ? value.input : JSON.stringify(value.input);
  return text;
}

/** What the data set is for, by the name that `fulmen train` gives it: `train tasks` of `dataset.demo.train_tasks`. */
export function useOf(resource: string): string {
  const use = resource.split(".").at(-1) ?? "";
  return /_(tasks|demonstrations)$|^demonstrations$/.test(use) ? use.replaceAll("_", " ") : "";
}

function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
