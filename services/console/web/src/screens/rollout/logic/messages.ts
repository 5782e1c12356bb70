// Requests and answers of any API as messages of a conversation. Nothing is invented, nothing is HTML, and nothing is fetched.

export type Role = "system" | "user" | "assistant" | "tool" | "other";

/** A part of a message. */
export interface Part {
  kind: "text" | "thought" | "call" | "result" | "media" | "data";
  text: string;
  /** Tool of a call or result; kind of media or data. */
  name?: string;
}

export interface Message {
  role: Role;
  /** What the writer called the role. */
  said: string;
  parts: Part[];
}

type Json = Record<string, unknown>;
const ROLES: Record<string, Role> = {
  system: "system",
  developer: "system",
  user: "user",
  assistant: "assistant",
  tool: "tool",
  function: "tool",
};

/** Returns the messages of a request; none of a format that is not known. */
export function messagesOf(request: unknown): Message[] {
  if (!isObject(request)) return [];
  if (Array.isArray(request.messages)) {
    return [...system(request.system), ...request.messages.filter(isObject).flatMap(turns)];
  }
  if ("input" in request) return [...system(request.instructions), ...items(request.input)];
  return typeof request.prompt === "string" ? [message("user", [part("text", request.prompt)])] : [];
}

/** Returns the names of the tools that a request offers. */
export function toolsOf(request: unknown): string[] {
  if (!isObject(request) || !Array.isArray(request.tools)) return [];
  return request.tools
    .filter(isObject)
    .map((tool) => text(isObject(tool.function) ? tool.function.name : (tool.name ?? tool.type)));
}

/** Returns a choice of an answer; undefined without one. */
export function answerOf(answer: unknown, choice: number): Message | undefined {
  if (!isObject(answer)) return undefined;
  const choices = Array.isArray(answer.choices) ? answer.choices.filter(isObject) : [];
  if (choices.length) {
    const found = choices.find(({ index }) => index === choice) ?? (choices.length === 1 ? choices[0] : undefined);
    if (isObject(found?.message)) return join(turns({ role: "assistant", ...found.message }));
    return typeof found?.text === "string" ? message("assistant", [part("text", found.text)]) : undefined;
  }
  if (Array.isArray(answer.content)) return join(turns({ role: "assistant", content: answer.content }));
  if (Array.isArray(answer.output)) return join(items(answer.output));
  return undefined;
}

/** Reads JSON of a record; undefined if it is none. */
export function jsonOf(bytes: Uint8Array): unknown {
  try {
    return JSON.parse(new TextDecoder().decode(bytes));
  } catch {
    return undefined;
  }
}

function system(value: unknown): Message[] {
  const parts = content(value);
  return parts.length ? [message("system", parts)] : [];
}

/** Items of the Responses API. */
function items(value: unknown): Message[] {
  if (typeof value === "string") return [message("user", [part("text", value)])];
  if (!Array.isArray(value)) return [];
  return value.filter(isObject).flatMap((item) => {
    switch (item.type) {
      case "function_call":
        return [message("assistant", [part("call", text(item.arguments), text(item.name))])];
      case "function_call_output":
        return [message("tool", [part("result", text(item.output))])];
      case "reasoning":
        return [
          message(
            "assistant",
            content(item.summary).map((each) => ({ ...each, kind: "thought" as const })),
          ),
        ];
      default:
        return turns({ role: "assistant", ...item });
    }
  });
}

/** A message as it was written, as one or more: results of tools stand alone. */
function turns(turn: Json): Message[] {
  const said = text(turn.role ?? turn.type ?? "message");
  const parts: Part[] = [];
  const thought = turn.reasoning_content ?? turn.reasoning;
  if (thought) parts.push(part("thought", text(thought)));
  parts.push(...content(turn.content));
  if (typeof turn.refusal === "string") parts.push(part("text", turn.refusal));
  for (const call of Array.isArray(turn.tool_calls) ? turn.tool_calls.filter(isObject) : []) {
    const called = isObject(call.function) ? call.function : isObject(call.custom) ? call.custom : {};
    parts.push(part("call", text(called.arguments ?? called.input), text(called.name ?? call.type)));
  }
  if (said === "tool" || said === "function") {
    return [
      message(
        said,
        parts.map((each) => (each.kind === "text" ? { ...each, kind: "result" } : each)),
      ),
    ];
  }
  const results = parts.filter(({ kind }) => kind === "result");
  const rest = parts.filter(({ kind }) => kind !== "result");
  const found = results.length ? [message("tool", results)] : [];
  return rest.length || !results.length ? [...found, message(said, rest)] : found;
}

function content(value: unknown): Part[] {
  if (value === null || value === undefined || value === "") return [];
  if (typeof value === "string") return [part("text", value)];
  if (!Array.isArray(value)) return isObject(value) ? [block(value)] : [part("text", text(value))];
  return value.map((each) => (isObject(each) ? block(each) : part("text", text(each))));
}

function block(value: Json): Part {
  switch (value.type) {
    case "tool_use":
      return part("call", text(value.input), text(value.name));
    case "tool_result":
      return part(
        "result",
        content(value.content)
          .map((each) => each.text)
          .join("\n"),
      );
    case "thinking":
      return part("thought", text(value.thinking));
    case "text":
    case "input_text":
    case "output_text":
    case "summary_text":
      return part("text", text(value.text));
    case "image_url":
    case "image":
    case "input_image":
    case "input_audio":
    case "file":
    case "input_file":
      return part("media", media(value), text(value.type));
    default:
      return typeof value.text === "string" ? part("text", value.text) : part("data", text(value), text(value.type));
  }
}

/** Says what media are; they are never shown, since what an agent names would be fetched. */
function media(value: Json): string {
  const found = isObject(value.image_url) ? value.image_url.url : (value.image_url ?? value.source ?? value.file);
  const address = typeof found === "string" ? found : text(found);
  const inline = /^data:([\w.+/-]{0,80})[;,]/.exec(address);
  if (inline) return `${inline[1] || "data"}, ${address.length.toLocaleString("en-US")} characters`;
  return address.length > 500 ? `${address.length.toLocaleString("en-US")} characters` : address;
}

function join(found: Message[]): Message | undefined {
  const parts = found.flatMap((each) => each.parts);
  return found.length ? message("assistant", parts) : undefined;
}

function message(said: string, parts: Part[]): Message {
  return { role: ROLES[said] ?? "other", said, parts };
}

function part(kind: Part["kind"], value: string, name?: string): Part {
  return name === undefined ? { kind, text: value } : { kind, text: value, name };
}

function text(value: unknown): string {
  if (typeof value === "string") return value;
  return value === undefined || value === null ? "" : JSON.stringify(value);
}

function isObject(value: unknown): value is Json {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
