// The rewards of a group.

import { RolloutService } from "../../api/gen/fulmen/store/v1/rollout_service_pb";
import { client } from "../../api/transport";

interface Group {
  project: string;
  run: string;
  groupId: string;
}

// A group has at most so many members.
const MOST = 4096;

/** Returns the rewards of a group's members; undefined for those that have none. */
export async function groupRewards(
  { project, run, groupId }: Group,
  signal: AbortSignal,
): Promise<(number | undefined)[]> {
  const rewards: (number | undefined)[] = [];
  let pageToken = "";
  do {
    const page = await client(RolloutService).listRollouts(
      { project, trainingRun: run, filter: `group_id = ${JSON.stringify(groupId)}`, pageSize: 1000, pageToken },
      { signal },
    );
    rewards.push(...page.rollouts.map(({ reward }) => reward));
    pageToken = page.nextPageToken;
  } while (pageToken && rewards.length < MOST);
  return rewards;
}
