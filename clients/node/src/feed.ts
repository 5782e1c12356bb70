// The two ends of the queue: creating rollouts, and reading the feed of those that are final.

import { randomUUID } from "node:crypto";

import { BatchCreateRolloutsRequest, WatchRolloutsRequest } from "../build/gen/fulmen/store/v1/rollout_service.js";
import type { Rollout } from "../build/gen/fulmen/store/v1/rollout.js";
import type { FinishedGroup } from "../build/gen/fulmen/store/v1/rollout_service.js";
import { call, whileUnavailable, type Connection } from "./connection.js";
import type { Emit, Options } from "./main.js";

/** Creates a group of rollouts with the same input. The request id makes the request idempotent. */
export async function create(store: Connection, options: Options, emit: Emit) {
  const { project, trainingRun, groupId, count, labels: requiredLabels } = options;
  const group = { project, trainingRun, groupId, groupSize: groupId ? count : 1 };
  const rollout = { ...group, requiredLabels, input: Buffer.from(options.input) };
  const requestId = options.requestId || randomUUID();
  const request = BatchCreateRolloutsRequest.fromPartial({ rollouts: Array(count).fill(rollout), requestId });
  const { rollouts } = await whileUnavailable(store.deadline, () =>
    call(store.rollouts, store.rollouts.batchCreateRollouts, request, store.metadata, store),
  );
  for (const { name, state } of rollouts) emit({ rollout: name, state });
}

/** Reads finished groups. A broken stream is opened again after the last group that was handled. */
export async function watch(store: Connection, options: Options, emit: Emit) {
  const { project, trainingRun, count } = options;
  let { cursor } = options;
  let handled = 0;
  await whileUnavailable(store.deadline, async () => {
    const request = WatchRolloutsRequest.fromPartial({ project, trainingRun, cursor });
    const stream = store.rollouts.watchRollouts(request, store.metadata, { deadline: store.deadline });
    let members: Rollout[] = [];
    try {
      for await (const { groups } of stream) {
        for (const part of groups) {
          members.push(...part.rollouts);
          if (!part.cursor) continue; // more of a large group follows
          emit(described(part, members));
          members = [];
          cursor = part.cursor;
          if (++handled === count) return;
        }
      }
    } finally {
      stream.cancel();
    }
  });
}

function described({ groupId, cursor }: FinishedGroup, rollouts: Rollout[]) {
  return {
    group_id: groupId,
    cursor,
    rollouts: rollouts.map(({ name, state, attempts }) => ({
      rollout: name,
      state,
      attempts: attempts.map((attempt) => ({
        attempt: attempt.name,
        state: attempt.state,
        failure_kind: attempt.failureKind,
        rewards: attempt.rewards.map(({ value }) => value),
        output: attempt.output.toString("utf8"),
      })),
    })),
  };
}
