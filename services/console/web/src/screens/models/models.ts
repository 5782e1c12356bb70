// What is computed of routes, backends and versions.

import type { Backend, BackendHealth } from "../../api/gen/fulmen/llm_proxy/v1/backend_pb";
import type { Route, RouteTarget } from "../../api/gen/fulmen/llm_proxy/v1/route_pb";
import type { ResourceVersion } from "../../api/gen/fulmen/store/v1/resource_pb";

/** `arithmetic` of `routes/arithmetic`. */
export function modelOf(route: Pick<Route, "name">): string {
  return route.name.replace(/^routes\//, "");
}

/** Share of a route's calls that a target gets. */
export function shareOf(target: RouteTarget, route: Route): number {
  if (route.targets.length === 1) return 1;
  const sum = route.targets.reduce((total, { weight }) => total + weight, 0);
  return sum ? target.weight / sum : 0;
}

/** A part of a route's calls: the targets of one backend, policy, version and model. */
export interface Split {
  id: string;
  target: RouteTarget;
  share: number;
  /** True if it gets far fewer calls than the largest: a canary. */
  isCanary: boolean;
}

const CANARY_SHARE = 0.2;

/** How a route splits its calls, the largest part first. */
export function splitsOf(route: Route): Split[] {
  const found = route.targets.map((target, index) => ({
    id: `${index}`,
    target,
    share: shareOf(target, route),
    isCanary: false,
  }));
  const largest = Math.max(0, ...found.map(({ share }) => share));
  for (const each of found) each.isCanary = each.share > 0 && each.share < largest && each.share <= CANARY_SHARE;
  return found.sort((a, b) => b.share - a.share);
}

/** Routes by name after messages of their watch. */
export function changedRoutes(
  known: ReadonlyMap<string, Route>,
  messages: { routes: Route[]; removed: string[] }[],
): ReadonlyMap<string, Route> {
  const next = new Map(known);
  for (const { routes, removed } of messages) {
    for (const each of routes) next.set(each.name, each);
    for (const name of removed) next.delete(name);
  }
  return next;
}

/** Weights of a split as typed, by backend: whole numbers from 0 to 10000 that do not sum to zero; or what is wrong. */
export function readWeights(typed: Record<string, string>): { weights: Record<string, number> } | { problem: string } {
  const weights: Record<string, number> = {};
  for (const [backend, text] of Object.entries(typed)) {
    const value = Number(text);
    if (!/^\d+$/.test(text.trim()) || value > 10_000) return { problem: `${backend}: a whole number from 0 to 10000` };
    weights[backend] = value;
  }
  return Object.values(weights).some((each) => each > 0)
    ? { weights }
    : { problem: "At least one weight must be greater than 0." };
}

/** True while calls to a backend wait. */
export function isHeld(backend: Backend, now: Date): boolean {
  const until = backend.holdUntilTime;
  return until !== undefined && Number(until.seconds) * 1000 > now.getTime();
}

/** Utilization of an engine's KV cache, 0 to 1; undefined if it does not tell. */
export function cacheOf(health: BackendHealth | undefined): number | undefined {
  return health && health.engineCacheUsage >= 0 ? health.engineCacheUsage : undefined;
}

/** A version with how far it is from the first of its line. */
export interface Descendant {
  version: ResourceVersion;
  depth: number;
}

/** Versions of one resource, newest first, each with its depth: how many of the versions listed it descends from. */
export function lineageOf(versions: ResourceVersion[]): Descendant[] {
  const byName = new Map(versions.map((each) => [each.name, each]));
  return versions.map((version) => {
    let depth = 0;
    const seen = new Set([version.name]);
    for (
      let parent = byName.get(version.parent);
      parent && !seen.has(parent.name);
      parent = byName.get(parent.parent)
    ) {
      seen.add(parent.name);
      depth += 1;
    }
    return { version, depth };
  });
}

/** The text in an event of a chat completion's stream; empty if it has none. */
export function deltaOf(event: Uint8Array): string {
  const text = new TextDecoder().decode(event);
  if (!text || text === "[DONE]") return "";
  const read = JSON.parse(text) as { choices?: { delta?: { content?: string | null } }[] };
  return read.choices?.[0]?.delta?.content ?? "";
}

/** What an error document of a call says. */
export function errorOf(document: Uint8Array, status: number): string {
  try {
    const read = JSON.parse(new TextDecoder().decode(document)) as { error?: { message?: string } | string };
    const said = typeof read.error === "string" ? read.error : read.error?.message;
    if (said) return said;
  } catch {
    // No JSON: the status says it.
  }
  return `The call was answered with HTTP status ${status}.`;
}
