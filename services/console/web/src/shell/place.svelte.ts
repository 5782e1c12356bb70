// The project that is looked at: that of the address, else the one that was looked at last, else that of the token.

import { session } from "../api/session.svelte";
import { router } from "./router.svelte";

const KEPT = "fulmen.project";

class Place {
  #last = $state(localStorage.getItem(KEPT) ?? "");

  /** `projects/{project}` */
  project = $derived.by(() => {
    const here = router.match?.params.project;
    if (here) return `projects/${here}`;
    const own = session.person?.project ?? "";
    if (own && own !== "projects/*") return own;
    return this.#last || "projects/default";
  });

  /** Remembers the project of the page. */
  keep(): void {
    localStorage.setItem(KEPT, (this.#last = this.project));
  }
}

export const place = new Place();
