// The rows of the list: loaded page by page, replaced as rollouts change. A change costs a look-up, however many rows there are.

import type { Rollout } from "../../api/gen/fulmen/store/v1/rollout_pb";

/** New rollouts that are put on top; further ones are counted until the list is loaded again. */
const MAX_FRESH = 200;

export class Rows {
  shown = $state.raw<Rollout[]>([]);
  /** Rollouts that changed and may belong somewhere in the list, but are not in it. */
  changed = $state(0);
  #loaded: Rollout[] = [];
  #places = new Map<string, number>();
  /** New rollouts above the loaded ones, newest first. */
  #fresh = new Map<string, Rollout>();

  /** Takes a page: the first one begins the list anew. A rollout that moved from one page to the next is kept once. */
  take(page: Rollout[], isFirst: boolean): void {
    if (isFirst) {
      this.#loaded = [];
      this.#places.clear();
      this.#fresh.clear();
      this.changed = 0;
    }
    for (const each of page) {
      if (this.#places.has(each.name) || this.#fresh.has(each.name)) continue;
      this.#places.set(each.name, this.#loaded.length);
      this.#loaded.push(each);
    }
    this.#show();
  }

  /** Replaces what changed; puts new ones on top if the list is of all rollouts, newest first, and counts them if not. */
  change(changes: Rollout[], isOfAll: boolean): void {
    const newest = this.shown[0]?.name ?? "";
    for (const each of changes) {
      const place = this.#places.get(each.name);
      if (place !== undefined) this.#loaded[place] = each;
      else if (this.#fresh.has(each.name)) this.#fresh.set(each.name, each);
      else if (!isOfAll) this.changed += 1;
      // Names begin with the time: what is older is on a page that is not loaded yet.
      else if (each.name <= newest) continue;
      else if (this.#fresh.size < MAX_FRESH) this.#fresh.set(each.name, each);
      else this.changed += 1;
    }
    this.#show();
  }

  #show(): void {
    const fresh = [...this.#fresh.values()].sort((one, other) => (one.name < other.name ? 1 : -1));
    this.shown = [...fresh, ...this.#loaded];
  }
}
