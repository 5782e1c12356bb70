// A rollout that is run again, with changes.

import type { Rollout } from "../../../api/gen/fulmen/store/v1/rollout_pb";
import { RolloutMode } from "../../../api/gen/fulmen/store/v1/rollout_pb";

export interface Changes {
  input: string;
  agent: string;
  /** Pinned versions, by the name that the agent uses. */
  resourceVersions: Record<string, string>;
}

/** Returns what is wrong with an input; empty if nothing is. */
export function inputProblem(input: string, contentType: string): string {
  if (contentType !== "application/json") return "";
  try {
    JSON.parse(input);
    return "";
  } catch (error) {
    return `The input is not JSON: ${error instanceof Error ? error.message : ""}`;
  }
}

/** Returns what to create: a rollout of its own, for no training and with the same input, agent and rules, but for the changes. */
export function again(rollout: Rollout, project: string, { input, agent, resourceVersions }: Changes) {
  return {
    project,
    mode: RolloutMode.TEST,
    input: new TextEncoder().encode(input),
    inputContentType: rollout.inputContentType,
    agent,
    resourceVersions,
    requiredLabels: rollout.requiredLabels,
    policy: rollout.policy,
    taskType: rollout.taskType,
    metadata: { "fulmen.again_of": rollout.name },
  };
}

/** The resource of a version: `resources/x` of `resources/x/versions/3`; empty if it is none. */
export function resourceOf(version: string): string {
  return /^(resources\/[^/]+)\/versions\/\d+$/.exec(version)?.[1] ?? "";
}
