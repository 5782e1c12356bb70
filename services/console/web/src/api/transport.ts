// The connection to the console's gateway, and one client per service.

import type { DescService } from "@bufbuild/protobuf";
import { type Client, createClient, type Interceptor } from "@connectrpc/connect";
import { createConnectTransport } from "@connectrpc/connect-web";

import { clock } from "../words/clock.svelte";
import { rememberCall, signedOut } from "./problems";
import { session } from "./session.svelte";

const noticesSignOut: Interceptor = (next) => async (request) => {
  try {
    return await next(request);
  } catch (error) {
    if (signedOut(error)) session.expire();
    throw error;
  }
};

/** Keeps with each error which rpc failed; a stream may fail at any of its messages. */
const namesRpc: Interceptor = (next) => async (request) => {
  const remember = (error: unknown) => rememberCall(error, request.service.typeName, request.method.name);
  try {
    const answer = await next(request);
    return answer.stream ? { ...answer, message: watched(answer.message, remember) } : answer;
  } catch (error) {
    remember(error);
    throw error;
  }
};

async function* watched<M>(messages: AsyncIterable<M>, remember: (error: unknown) => void): AsyncIterable<M> {
  try {
    yield* messages;
  } catch (error) {
    remember(error);
    throw error;
  }
}

const tellsTime: Interceptor = (next) => async (request) => {
  const askedMs = Date.now();
  const answer = await next(request);
  clock.hear(answer.header.get("date"), askedMs);
  return answer;
};

/** Where the console is, with its path prefix and without a slash at the end. */
export const root = new URL(".", document.baseURI).pathname.replace(/\/$/, "");

const transport = createConnectTransport({
  baseUrl: root,
  defaultTimeoutMs: undefined,
  interceptors: [namesRpc, noticesSignOut, tellsTime],
});

const clients = new Map<DescService, unknown>();

/** Returns the client of a service. Its calls have the rights of the person who signed in. */
export function client<S extends DescService>(service: S): Client<S> {
  let found = clients.get(service) as Client<S> | undefined;
  if (!found) clients.set(service, (found = createClient(service, transport)));
  return found;
}
