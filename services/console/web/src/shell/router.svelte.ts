// Addresses. Paths are resource names: `projects/default/rollouts/abc` is the page of that rollout. Links are plain `<a href>`
// relative to the base of the page, which is the console's path prefix.

import { root } from "../api/transport";
import { type Route, routes } from "../routes";

/** The route of an address, and the parts of the address that it names. */
export interface Match {
  route: Route;
  params: Record<string, string>;
}

const compiled = routes.map((route) => ({
  route,
  pattern: new RegExp(`^${route.path.replace(/:(\w+)\*/g, "(?<$1>.+)").replace(/:(\w+)/g, "(?<$1>[^/]+)")}$`),
}));

/** Returns the route of a path without the prefix; undefined if there is none. */
export function matchOf(path: string): Match | undefined {
  for (const { route, pattern } of compiled) {
    const found = pattern.exec(path);
    if (found) {
      try {
        const params = Object.entries(found.groups ?? {}).map(([name, value]) => [name, decodeURIComponent(value)]);
        return { route, params: Object.fromEntries(params) as Record<string, string> };
      } catch {
        return undefined; // a malformed escape
      }
    }
  }
  return undefined;
}

class Router {
  path = $state("");
  query = $state.raw(new URLSearchParams());
  match = $derived(matchOf(this.path));

  constructor() {
    this.#read();
    addEventListener("popstate", () => this.#read());
    document.addEventListener("click", (event) => this.#follow(event));
  }

  /** Opens a path, relative to the prefix. */
  go(path: string): void {
    history.pushState(null, "", `${root}/${path}`);
    this.#read();
    scrollTo(0, 0);
    document.querySelector<HTMLElement>("main")?.focus({ preventScroll: true });
  }

  /** Changes parameters of the address without a new entry in the history; empty ones are removed. */
  setQuery(changes: Record<string, string | undefined>): void {
    const query = new URLSearchParams(this.query);
    for (const [name, value] of Object.entries(changes)) {
      if (value) query.set(name, value);
      else query.delete(name);
    }
    const text = query.toString();
    history.replaceState(null, "", location.pathname + (text ? `?${text}` : ""));
    this.query = query;
  }

  #read(): void {
    this.path = location.pathname.slice(root.length + 1);
    this.query = new URLSearchParams(location.search);
  }

  #follow(event: MouseEvent): void {
    const link = (event.target as Element | null)?.closest?.("a");
    const isPlain = event.button === 0 && !event.metaKey && !event.ctrlKey && !event.shiftKey && !event.altKey;
    if (!link || !isPlain || event.defaultPrevented || link.target || link.hasAttribute("download")) return;
    if (link.origin !== location.origin || !link.pathname.startsWith(`${root}/`)) return;
    const path = link.pathname.slice(root.length + 1);
    if (!matchOf(path)) return;
    event.preventDefault();
    this.go(path + link.search);
  }
}

export const router = new Router();
