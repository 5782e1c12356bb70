// The conversations of an attempt: of each model call, what is new, and what was said before it.

import type { ModelCallRecord } from "../../../api/gen/fulmen/type/v1/model_call_pb";
import { answerOf, jsonOf, type Message, messagesOf, toolsOf } from "./messages";

/** A call with its tokens and texts. */
export interface WholeCall {
  /** Id of its span. */
  id: string;
  record: ModelCallRecord;
  /** Index of its choice in the answer. */
  choice: number;
}

/** A model call in a conversation. */
export interface Turn {
  id: string;
  record: ModelCallRecord;
  /** What earlier calls have shown already. */
  earlier: Message[];
  fresh: Message[];
  answer?: Message;
  tools: string[];
  /** True if the proxy did not keep the texts: they were too large. */
  isTextless: boolean;
}

/** Reads calls one after the other, in the order of their times. */
export class Conversations {
  /** Digests of everything that was said up to some message. */
  readonly #told = new Set<string>();

  add({ id, record, choice }: WholeCall): Turn {
    const request = jsonOf(record.requestJson);
    const messages = messagesOf(request);
    const answer = answerOf(jsonOf(record.responseJson), choice);
    let before = record.agentName;
    let known = 0;
    const digests = messages.map((message, at) => {
      before = digest(before, message);
      if (this.#told.has(before)) known = at + 1;
      return before;
    });
    for (const each of digests) this.#told.add(each);
    if (answer) this.#told.add(digest(before, answer));
    return {
      id,
      record,
      earlier: messages.slice(0, known),
      fresh: messages.slice(known),
      ...(answer ? { answer } : {}),
      tools: toolsOf(request),
      isTextless: !record.requestJson.length && !record.responseJson.length,
    };
  }
}

function digest(before: string, { role, parts }: Message): string {
  return hash(`${before}\n${role}\n${parts.map(({ kind, text, name }) => `${kind} ${name ?? ""} ${text}`).join("\n")}`);
}

/** A quick hash of 53 bits (cyrb53): it only has to tell messages of one attempt apart. */
function hash(text: string): string {
  let high = 0xdeadbeef;
  let low = 0x41c6ce57;
  for (let at = 0; at < text.length; at++) {
    const code = text.charCodeAt(at);
    high = Math.imul(high ^ code, 2654435761);
    low = Math.imul(low ^ code, 1597334677);
  }
  high = Math.imul(high ^ (high >>> 16), 2246822507) ^ Math.imul(low ^ (low >>> 13), 3266489909);
  low = Math.imul(low ^ (low >>> 16), 2246822507) ^ Math.imul(high ^ (high >>> 13), 3266489909);
  return (4294967296 * (2097151 & low) + (high >>> 0)).toString(36);
}
