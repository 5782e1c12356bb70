// Channels to the store and the LLM proxy, with their addresses, credentials and deadline.

import { readFileSync } from "node:fs";
import { setTimeout as pause } from "node:timers/promises";

import { credentials, Metadata, type CallOptions, type ClientUnaryCall, type ServiceError } from "@grpc/grpc-js";

import { CompletionServiceClient } from "../build/gen/fulmen/llm_proxy/v1/completion_service.js";
import { LeaseServiceClient } from "../build/gen/fulmen/store/v1/lease_service.js";
import { RolloutServiceClient } from "../build/gen/fulmen/store/v1/rollout_service.js";
import { SpanServiceClient } from "../build/gen/fulmen/store/v1/span_service.js";
import { decoded, FulmenError } from "./errors.js";

const PAUSE_MS = 200;

export type Connection = ReturnType<typeof connect>;

/** Opens channels to the addresses in the environment; nothing is sent before the first call. */
export function connect(deadline: Date) {
  const { env } = process;
  const security = channelSecurity();
  const store = env.FULMEN_STORE_TARGET ?? "127.0.0.1:7101";
  const leases = new LeaseServiceClient(store, security);
  const rollouts = new RolloutServiceClient(store, security);
  const spans = new SpanServiceClient(store, security);
  const completions = new CompletionServiceClient(env.FULMEN_LLM_PROXY_TARGET ?? "127.0.0.1:7201", security);
  const close = () => [leases, rollouts, spans, completions].forEach((client) => client.close());
  return { leases, rollouts, spans, completions, deadline, metadata: bearer(token()), close };
}

/** Returns the caller's credentials: the program's own token, except in calls for an attempt. */
export function bearer(key: string): Metadata {
  const metadata = new Metadata();
  if (key) metadata.set("authorization", `Bearer ${key}`);
  return metadata;
}

function token(): string {
  const { FULMEN_TOKEN, FULMEN_TOKEN_FILE } = process.env;
  return FULMEN_TOKEN ?? (FULMEN_TOKEN_FILE ? readFileSync(FULMEN_TOKEN_FILE, "utf8").trim() : "");
}

function channelSecurity() {
  const { FULMEN_TLS_CA_FILE, FULMEN_TLS_CERTIFICATE_FILE, FULMEN_TLS_KEY_FILE } = process.env;
  if (!FULMEN_TLS_CA_FILE) return credentials.createInsecure();
  const read = (path?: string) => (path ? readFileSync(path) : null);
  return credentials.createSsl(read(FULMEN_TLS_CA_FILE), read(FULMEN_TLS_KEY_FILE), read(FULMEN_TLS_CERTIFICATE_FILE));
}

type Unary<Request, Response> = (
  request: Request,
  metadata: Metadata,
  options: Partial<CallOptions>,
  callback: (error: ServiceError | null, response: Response) => void,
) => ClientUnaryCall;

/** Makes a unary call: `call(store.rollouts, store.rollouts.getRollout, request, metadata, options)`. */
export function call<Request, Response>(
  client: unknown,
  method: Unary<Request, Response>,
  request: Request,
  metadata: Metadata,
  { deadline, signal }: { deadline: Date; signal?: AbortSignal },
): Promise<Response> {
  return new Promise((resolve, reject) => {
    signal?.throwIfAborted();
    const running = method.call(client, request, metadata, { deadline }, (error, response) =>
      error ? reject(decoded(error)) : resolve(response),
    );
    signal?.addEventListener("abort", () => running.cancel());
  });
}

/** Repeats an operation while the server cannot be reached: the only error that may be retried unchanged. */
export async function whileUnavailable<Result>(deadline: Date, work: () => Promise<Result>): Promise<Result> {
  for (;;) {
    try {
      return await work();
    } catch (cause) {
      const error = decoded(cause);
      const last = Date.now() + PAUSE_MS >= deadline.getTime();
      if (last || !(error instanceof FulmenError && error.unreachable)) throw error;
      await pause(PAUSE_MS);
    }
  }
}
