// The two sides of a comparison, as they stand in the address.

/** A side: rollouts of a run, of a policy version's validation, or with a prompt. */
export interface Side {
  /** Id of the training run; empty for all of them. */
  run: string;
  /** What is compared: `validation/3/` (how group ids begin), or a filter. */
  what: string;
}

/** Reads a side from the address: `run` and `what` behind a letter. */
export function sideOf(query: URLSearchParams, letter: "a" | "b"): Side {
  return { run: query.get(`${letter}.run`) ?? "", what: query.get(`${letter}.what`) ?? "" };
}

/** A side as the store takes it. */
export interface SideRequest {
  trainingRun: string;
  filter: string;
  groupIdPrefix: string;
}

const GROUPS = /^[a-z0-9-]+\/[^\s=<>]*$/;

/** Returns a side as the store takes it: what looks like the beginning of a group id is one, everything else a filter. */
export function requested(side: Side, project: string): SideRequest {
  const what = side.what.trim();
  const isGroup = GROUPS.test(what);
  return {
    trainingRun: side.run ? `projects/${project}/trainingRuns/${side.run}` : "",
    filter: isGroup ? "" : what,
    groupIdPrefix: isGroup ? what : "",
  };
}

/** True if something is asked for. */
export function isAsked(side: Side): boolean {
  return Boolean(side.run || side.what.trim());
}

/** Validated versions of a run, by the beginnings of their group ids: `validation/3/`. */
export function versionsOf(groupIds: string[]): string[] {
  const found = groupIds.flatMap((id) => /^(?:branch-\d+\/)?validation\/\d+\//.exec(id) ?? []);
  return [...new Set(found)].sort((a, b) => numberIn(a) - numberIn(b));
}

function numberIn(prefix: string): number {
  return Number(/validation\/(\d+)\//.exec(prefix)?.[1] ?? 0);
}
