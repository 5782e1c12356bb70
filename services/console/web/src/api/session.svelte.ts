// Who is signed in.

import { clock } from "../words/clock.svelte";

/** The person, as `GET /session` answers. */
export interface Person {
  role: string;
  subject: string;
  /** `projects/{project}`; `projects/*` for administrators of the deployment. */
  project: string;
  expireUnixSeconds?: number;
}

const ACTING = new Set(["client", "admin", "service"]);

class Session {
  /** Undefined until known, null if nobody is signed in. */
  person = $state<Person | null | undefined>(undefined);
  /** Why the last attempt failed; empty if it did not. */
  problem = $state("");

  /** True if the role may change things; services decide, this only says what is offered. */
  mayAct = $derived(ACTING.has(this.person?.role ?? ""));
  isAdmin = $derived(this.person?.role === "admin");

  /** Finds out who is signed in; uses the one-time code in the fragment of the address up, if there is one. */
  async begin(): Promise<void> {
    const code = new URLSearchParams(location.hash.slice(1)).get("code");
    if (code) {
      history.replaceState(null, "", location.pathname + location.search);
      if (await this.signIn({ code })) return;
    }
    await this.#ask("GET");
  }

  /** Signs in. False if it failed; `problem` says why. */
  async signIn(given: { token: string } | { code: string }): Promise<boolean> {
    return this.#ask("POST", given);
  }

  async signOut(): Promise<void> {
    await fetch("session", { method: "DELETE" });
    this.person = null;
  }

  /** Called when a service says that the session has ended. */
  expire(): void {
    if (!this.person) return;
    this.person = null;
    this.problem = "Your session has ended. Sign in again.";
  }

  async #ask(method: string, body?: unknown): Promise<boolean> {
    const problem = this.problem;
    this.problem = "";
    const askedMs = Date.now();
    try {
      const answer = await fetch("session", {
        method,
        headers: body ? { "content-type": "application/json" } : {},
        body: body ? JSON.stringify(body) : null,
        signal: AbortSignal.timeout(30_000),
      });
      // The first answer of all: what is loaded for the last hours is then right, whatever the browser's clock says.
      clock.hear(answer.headers.get("date"), askedMs);
      const read = (await answer.json()) as Person & { message?: string };
      if (answer.ok) this.person = read;
      else {
        this.person = null;
        // Nobody was signed in: that is no failure.
        this.problem = method === "GET" ? problem : (read.message ?? "The console did not accept the token.");
      }
      return answer.ok;
    } catch {
      this.person ??= null;
      this.problem = "The console cannot be reached. Try again.";
      return false;
    }
  }
}

export const session = new Session();
