import { create } from "@bufbuild/protobuf";
import { expect, test } from "vitest";

import { ShardStatusSchema } from "../../api/gen/fulmen/algorithm/v1/gradient_exchange_service_pb";
import { TrainingRunEventSchema } from "../../api/gen/fulmen/algorithm/v1/training_run_pb";
import { decisionsOf, isStraggler, membersOf, stepsOf, totalsOf } from "./exchange";

const shards = [
  create(ShardStatusSchema, {
    round: 9n,
    ratio: 10,
    receivedBytes: 100n,
    sentBytes: 100n,
    sumCount: 9n,
    partialSumCount: 1n,
    waitS: 2,
    members: [
      { rank: 1, firstRound: 1n, round: 7n, lateCount: 2n, idleS: 9 },
      { rank: 0, firstRound: 1n, round: 9n, idleS: 0.5 },
    ],
  }),
  create(ShardStatusSchema, {
    round: 9n,
    ratio: 40,
    receivedBytes: 50n,
    sentBytes: 50n,
    sumCount: 9n,
    waitS: 1,
    members: [
      { rank: 0, firstRound: 1n, round: 9n, idleS: 0.1 },
      { rank: 1, firstRound: 1n, round: 8n, lateCount: 1n, idleS: 8 },
    ],
  }),
];

test("a member is as far as at the shard where it is furthest behind", () => {
  const members = membersOf(shards);
  expect(
    members.map(({ rank, behind, lateCount, idleS, shardCount }) => [rank, behind, lateCount, idleS, shardCount]),
  ).toEqual([
    [0, 0n, 0n, 0.1, 2],
    [1, 2n, 3n, 8, 2],
  ]);
  expect(members.map((each) => isStraggler(each, shards))).toEqual([false, true]);
});

test("ratios of shards are weighed by what they moved", () => {
  const { round, received, sent, ratio, sums, partial } = totalsOf(shards);
  expect([round, received, sent, ratio, sums, partial]).toEqual([9n, 150n, 150n, 20, 18n, 1n]);
  expect(totalsOf([]).ratio).toBeUndefined();
});

test("steps and decisions come from the events of a run", () => {
  const step = (number: number, values: Record<string, number>) =>
    create(TrainingRunEventSchema, { event: { case: "step", value: { step: BigInt(number), values } } });
  const notice = (sequence: bigint, message: string) =>
    create(TrainingRunEventSchema, { sequence, event: { case: "notice", value: { severity: "info", message } } });
  const events = [
    step(2, {
      exchange_ratio: 8,
      exchange_gradient_cosine: 0.9,
      exchange_encode_seconds: 1,
      exchange_decode_seconds: 2,
    }),
    step(1, { exchange_ratio: 4 }),
    step(3, { loss: 1 }),
    notice(4n, "exchange: off, it would cost more than it saves"),
    notice(5n, "a checkpoint was written"),
    notice(6n, "exchange: on"),
    step(1, { exchange_ratio: 5 }),
  ];
  expect(stepsOf(events)).toEqual([
    { step: 1, ratio: 5, cosine: null, seconds: 0 },
    { step: 2, ratio: 8, cosine: 0.9, seconds: 3 },
  ]);
  expect(decisionsOf(events).map(({ message }) => message)).toEqual(["on", "off, it would cost more than it saves"]);
});
