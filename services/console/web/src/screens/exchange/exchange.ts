// What is computed of an exchange's shards.

import type { ShardStatus } from "../../api/gen/fulmen/algorithm/v1/gradient_exchange_service_pb";
import type { TrainingRunEvent } from "../../api/gen/fulmen/algorithm/v1/training_run_pb";

/** A member over all shards. */
export interface Member {
  rank: number;
  firstRound: bigint;
  /** Its latest round, at the shard where it is furthest behind. */
  round: bigint;
  /** Rounds behind the latest one. */
  behind: bigint;
  /** Sums without it. */
  lateCount: bigint;
  /** Seconds since its last message to any shard. */
  idleS: number;
  /** Shards that know it. */
  shardCount: number;
}

/** Members by rank: of several shards, the worst of each figure counts, and the shortest silence. */
export function membersOf(shards: ShardStatus[]): Member[] {
  const found = new Map<number, Member>();
  for (const { members, round: latest } of shards) {
    for (const { rank, firstRound, round, lateCount, idleS } of members) {
      const behind = latest > round ? latest - round : 0n;
      const known = found.get(rank);
      if (!known) {
        found.set(rank, { rank, firstRound, round, behind, lateCount, idleS, shardCount: 1 });
        continue;
      }
      if (round < known.round) known.round = round;
      if (firstRound < known.firstRound) known.firstRound = firstRound;
      if (behind > known.behind) known.behind = behind;
      known.lateCount += lateCount;
      known.idleS = Math.min(known.idleS, idleS);
      known.shardCount += 1;
    }
  }
  return [...found.values()].sort((a, b) => a.rank - b.rank);
}

/** True if a member holds the others up: it is behind, and was silent for longer than sums wait. */
export function isStraggler({ behind, idleS }: Member, shards: ShardStatus[]): boolean {
  return behind > 0n && idleS > Math.max(0, ...shards.map(({ waitS }) => waitS));
}

/** Figures of all shards together. */
export function totalsOf(shards: ShardStatus[]) {
  const sum = (read: (shard: ShardStatus) => bigint) => shards.reduce((total, each) => total + read(each), 0n);
  const received = sum(({ receivedBytes }) => receivedBytes);
  const sent = sum(({ sentBytes }) => sentBytes);
  const moved = Number(received + sent);
  // Shards of one run have the same codec, so what they moved weighs their ratios.
  const raw = shards.reduce((total, each) => total + each.ratio * Number(each.receivedBytes + each.sentBytes), 0);
  return {
    round: shards.reduce((latest, { round }) => (round > latest ? round : latest), 0n),
    received,
    sent,
    ratio: moved ? raw / moved : undefined,
    sums: sum(({ sumCount }) => sumCount),
    partial: sum(({ partialSumCount }) => partialSumCount),
    corrupt: sum(({ badChecksumCount }) => badChecksumCount),
    removed: sum(({ removedMemberCount }) => removedMemberCount),
    lost: sum(({ lostResidualCount }) => lostResidualCount),
  };
}

/** A step of a run, with what it reports of its exchange. */
export interface ExchangedStep {
  step: number;
  ratio: number | null;
  cosine: number | null;
  seconds: number | null;
}

/** The figures of an exchange in the events of a run, by step; of a step that was trained again, the last ones. */
export function stepsOf(events: TrainingRunEvent[]): ExchangedStep[] {
  const found = new Map<number, ExchangedStep>();
  for (const { event } of events) {
    if (event.case !== "step") continue;
    const { step, values } = event.value;
    const ratio = values.exchange_ratio;
    if (ratio === undefined) continue;
    const seconds = ["encode", "transfer", "decode"].map((part) => values[`exchange_${part}_seconds`] ?? 0);
    found.set(Number(step), {
      step: Number(step),
      ratio,
      cosine: values.exchange_gradient_cosine ?? null,
      seconds: seconds.reduce((sum, each) => sum + each, 0),
    });
  }
  return [...found.values()].sort((a, b) => a.step - b.step);
}

/** A notice of a run about its exchange. */
export interface Decision {
  sequence: bigint;
  severity: string;
  message: string;
}

/** What was decided about an exchange: notices that begin with `exchange`, newest first. */
export function decisionsOf(events: TrainingRunEvent[]): Decision[] {
  return events
    .flatMap(({ event, sequence }) =>
      event.case === "notice" && /^exchange\b/.test(event.value.message)
        ? [{ sequence, severity: event.value.severity, message: event.value.message.replace(/^exchange:\s*/, "") }]
        : [],
    )
    .reverse();
}
