// Which rollouts a group has, and what they answered.

import type { Attempt } from "../../api/gen/fulmen/store/v1/attempt_pb";
import type { Rollout } from "../../api/gen/fulmen/store/v1/rollout_pb";
import { shortName } from "../../words/format";
import { quoted } from "../rollouts/query";

const HOUR_MS = 3_600_000;
const UUID_TIME = /^[0-9a-f]{8}-[0-9a-f]{4}-7/;

/** A group of a project: of a training run, or of none. */
export interface GroupAddress {
  project: string;
  run: string;
  group: string;
  /** UUID of a member, whose time says where to look; empty if it is not known. */
  near: string;
}

/** Returns the filter that selects the members of a group. Those of a group are created together: within a day. */
export function membersFilter({ run, group, near }: GroupAddress): string {
  const terms = [`group_id = ${quoted(group)}`];
  if (!run) terms.push("NOT training_run:*");
  if (UUID_TIME.test(near)) {
    const madeMs = Number.parseInt(near.slice(0, 8) + near.slice(9, 13), 16);
    const [from, to] = [-24, 24].map((hours) => new Date(madeMs + hours * HOUR_MS).toISOString());
    terms.push(`create_time > "${from}"`, `create_time < "${to}"`);
  }
  return terms.join(" AND ");
}

/** Returns the attempt that decided, or the last one. */
export function deciding(rollout: Rollout): Attempt | undefined {
  return rollout.attempts.findLast(({ final }) => final) ?? rollout.attempts.at(-1);
}

/** Returns content as text: of a JSON string its value, other JSON with line breaks. */
export function textOf(content: Uint8Array): string {
  const text = new TextDecoder().decode(content);
  try {
    const value: unknown = JSON.parse(text);
    return typeof value === "string" ? value : JSON.stringify(value, null, 2);
  } catch {
    return text;
  }
}

/** Returns the path of the group of a rollout. */
export function groupPath({ project, groupId, trainingRun, name }: Rollout): string {
  const query = new URLSearchParams({ run: trainingRun, near: shortName(name) });
  return `${project}/groups/${encodeURIComponent(groupId)}?${query.toString()}`;
}
