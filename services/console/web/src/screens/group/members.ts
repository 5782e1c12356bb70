// The members of a group, read from the store.

import type { Rollout } from "../../api/gen/fulmen/store/v1/rollout_pb";
import { RolloutService } from "../../api/gen/fulmen/store/v1/rollout_service_pb";
import { client } from "../../api/transport";
import { type GroupAddress, membersFilter } from "./answers";

/** Members of a group that are shown at most. */
export const MAX_MEMBERS = 64;
const AT_ONCE = 6;

/** Reads the members of a group with their answers, the oldest one first. */
export async function membersOf(address: GroupAddress, signal: AbortSignal): Promise<Rollout[]> {
  const request = {
    project: address.project,
    trainingRun: address.run,
    filter: membersFilter(address),
    pageSize: MAX_MEMBERS,
  };
  const names: string[] = [];
  let pageToken = "";
  do {
    const page = await client(RolloutService).listRollouts({ ...request, pageToken }, { signal });
    names.push(...page.rollouts.map(({ name }) => name));
    pageToken = page.nextPageToken;
    // A group is whole long before the list ends.
    if (names.length && page.rollouts.length === 0) break;
  } while (pageToken && names.length < MAX_MEMBERS);
  names.sort();
  const found: Rollout[] = [];
  for (let start = 0; start < names.length; start += AT_ONCE) {
    const part = names.slice(start, start + AT_ONCE);
    const answers = await Promise.all(part.map((name) => client(RolloutService).getRollout({ name }, { signal })));
    found.push(...answers.flatMap(({ rollout }) => (rollout ? [rollout] : [])));
  }
  return found;
}
