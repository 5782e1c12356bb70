// Scores of a model for all rollouts that match. Each is written at once, as a score of the person in a dimension: the store knows
// how far it is, and whoever begins again, in any browser, goes on there.

import { Code } from "@connectrpc/connect";

import { CompletionService } from "../../api/gen/fulmen/llm_proxy/v1/completion_service_pb";
import { AnnotationService } from "../../api/gen/fulmen/store/v1/annotation_service_pb";
import { type Rollout, RolloutState } from "../../api/gen/fulmen/store/v1/rollout_pb";
import { PageError, problemOf } from "../../api/problems";
import { pause } from "../../api/streams.svelte";
import { client } from "../../api/transport";
import { ownScores } from "../data/scores";
import { errorOf } from "../models/models";
import { listed, type Matching, textsOf } from "./bulk";
import { type Judge, questionOf, verdictOf } from "./judge";

const CALLS = 4;
const TRIES = 3;
const OK = 200;
/** Rejections that pass by themselves. */
const TRANSIENT = new Set([408, 409, 425, 429]);
/** Longest time for which a call that was refused waits; one that has to wait longer ends the go. */
const MAX_WAIT_S = 60;
/** Scored in one go at most: the page has to stay open. */
export const MAX_SCORED = 10_000;

/** How far it is. */
export interface Rescored {
  scored: number;
  /** Scored before, by the same person in the same dimension. */
  known: number;
  /** Without a score: the model gave none that is valid. */
  failed: number;
  /** False if more rollouts match than are scored in one go. */
  isWhole: boolean;
}

/**
 * Scores what has succeeded and has no score yet, until all is done or `signal` ends it.
 *
 * Throws if the model refuses the call or stays unavailable: the next one would fare no better.
 */
export async function rescoreAll(
  matching: Matching,
  judge: Judge,
  author: string,
  progress: (now: Rescored) => void,
  signal: AbortSignal,
): Promise<void> {
  const { project } = matching;
  const annotations = client(AnnotationService);
  const own = await ownScores(annotations, { project, dimension: judge.dimension, author }, signal);
  const known = new Set(own.map(({ rollout }) => rollout));
  const now: Rescored = { scored: 0, known: 0, failed: 0, isWhole: true };

  async function score({ name, endedAttemptCount }: Rollout): Promise<void> {
    // It may have been scored in another tab since the list was read, or so long ago that the list left it out.
    const of = { project, rollout: name, dimension: judge.dimension, author, pageSize: 1 };
    if ((await annotations.listAnnotations(of, { signal })).annotations.length) {
      now.known += 1;
      return;
    }
    const texts = await textsOf({ name, endedAttemptCount });
    const body = questionOf(judge, texts, crypto.randomUUID());
    const verdict = verdictOf(await answerOf(project, body, signal), judge.model);
    if (!verdict) {
      now.failed += 1;
      return;
    }
    // Without the signal: a score that is paid for is kept.
    await annotations.createAnnotation({ annotation: { rollout: name, dimension: judge.dimension, ...verdict } });
    now.scored += 1;
  }

  async function counted(rollout: Rollout): Promise<void> {
    try {
      await alone(`fulmen-score ${rollout.name} ${judge.dimension} ${author}`, signal, () => score(rollout));
    } catch (error) {
      const { code } = problemOf(error);
      // Scored meanwhile in another browser; or deleted.
      if (code === Code.AlreadyExists) now.known += 1;
      else if (code !== Code.NotFound) throw error;
    }
    progress({ ...now });
  }

  for await (const rollouts of listed(matching, [RolloutState.SUCCEEDED])) {
    const fresh = rollouts.filter(({ name }) => !known.has(name));
    const room = MAX_SCORED - now.scored - now.failed;
    now.known += rollouts.length - fresh.length;
    now.isWhole = fresh.length <= room;
    progress({ ...now });
    await together(fresh.slice(0, room), signal, counted);
    if (!now.isWhole) return;
  }
}

/** Does something once all tabs of the browser that do the same have ended it: of two tabs, one pays for a score, and the other finds it. */
async function alone(what: string, signal: AbortSignal, work: () => Promise<void>): Promise<void> {
  // Pages that are not served over HTTPS or from this machine have no locks.
  if (!("locks" in navigator)) return work();
  await navigator.locks.request(what, { signal }, work);
}

/** Does something for all items, a few at once. After a failure no item begins; those on their way end, since they are paid for. */
async function together<T>(items: T[], signal: AbortSignal, work: (item: T) => Promise<void>): Promise<void> {
  // Each takes the next item from the one iterator.
  const left = items.values();
  let hasFailed = false;
  const worker = async () => {
    for (const item of left) {
      signal.throwIfAborted();
      if (hasFailed) return;
      try {
        await work(item);
      } catch (error) {
        hasFailed = true;
        throw error;
      }
    }
  };
  const ends = await Promise.allSettled(Array.from({ length: CALLS }, worker));
  const failed = ends.find((each) => each.status === "rejected");
  if (failed) throw failed.reason;
}

async function answerOf(project: string, body: string, signal: AbortSignal): Promise<Uint8Array> {
  const request = { path: "/v1/chat/completions", bodyJson: new TextEncoder().encode(body), project };
  for (let attempt = 1; ; attempt += 1) {
    const answer = await client(CompletionService).complete(request, { signal });
    if (answer.httpStatus === OK) return answer.bodyJson;
    const isTransient = answer.httpStatus > 499 || TRANSIENT.has(answer.httpStatus);
    if (!isTransient || attempt === TRIES || answer.retryAfterSeconds > MAX_WAIT_S)
      throw new PageError(errorOf(answer.bodyJson, answer.httpStatus));
    await pause(Math.max(answer.retryAfterSeconds, attempt) * 1000, signal);
    signal.throwIfAborted();
  }
}
