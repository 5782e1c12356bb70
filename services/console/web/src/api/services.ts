// Which services answer and are ready.

import { Code, ConnectError } from "@connectrpc/connect";

/** A service, as its own health check says. */
export interface Service {
  name: string;
  isServing: boolean;
  text: string;
}

const WORDS: Record<string, string> = {
  SERVING: "ready",
  NOT_SERVING: "not ready",
  UNREACHABLE: "does not answer",
};

const NAMES: Record<string, string> = { store: "Store", llm_proxy: "LLM proxy", algorithm: "Algorithm service" };

/** Asks all services that the console knows. */
export async function servicesNow(signal: AbortSignal): Promise<Service[]> {
  const answer = await fetch("services", { signal });
  if (!answer.ok) throw new ConnectError(`HTTP ${answer.status}`, Code.Unavailable);
  const { services } = (await answer.json()) as { services: { name: string; status: string }[] };
  return services.map(({ name, status }) => ({
    name: NAMES[name] ?? name,
    isServing: status === "SERVING",
    text: WORDS[status] ?? status.toLowerCase(),
  }));
}
