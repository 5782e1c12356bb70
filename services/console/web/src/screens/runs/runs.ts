// Training runs, from the algorithm service, or from the store if that is gone.

import { Code } from "@connectrpc/connect";

import type { TrainingRun } from "../../api/gen/fulmen/algorithm/v1/training_run_pb";
import { TrainingRunService } from "../../api/gen/fulmen/algorithm/v1/training_run_service_pb";
import { RunLeaseService } from "../../api/gen/fulmen/store/v1/run_lease_service_pb";
import { problemOf } from "../../api/problems";
import { client } from "../../api/transport";
import { runOfRecord } from "./facts";

/** Runs, and whether the store alone knows them now. */
export interface RunsFound {
  runs: TrainingRun[];
  isFromStore: boolean;
}

const LISTED = 200;
const STORE_PAGES = 20;
const GONE_AFTER_MS = 5_000;

/** Lists the newest runs of a project. */
export async function listRuns(project: string, signal: AbortSignal): Promise<RunsFound> {
  try {
    const request = { project, pageSize: LISTED };
    const { trainingRuns } = await client(TrainingRunService).listTrainingRuns(request, {
      signal,
      timeoutMs: GONE_AFTER_MS,
    });
    return { runs: trainingRuns, isFromStore: false };
  } catch (error) {
    if (!isGone(error, signal)) throw error;
    const runs = await recordedRuns(project, signal);
    return { runs: runs.slice(0, LISTED), isFromStore: true };
  }
}

/** Returns one run. */
export async function getRun(name: string, signal: AbortSignal): Promise<{ run: TrainingRun; isFromStore: boolean }> {
  try {
    const { trainingRun } = await client(TrainingRunService).getTrainingRun(
      { name },
      { signal, timeoutMs: GONE_AFTER_MS },
    );
    return { run: trainingRun!, isFromStore: false };
  } catch (error) {
    if (!isGone(error, signal)) throw error;
    const found = (await recordedRuns(name.split("/trainingRuns/")[0]!, signal)).find((each) => each.name === name);
    if (!found) throw error;
    return { run: found, isFromStore: true };
  }
}

/** True if the service did not answer, or this console knows none. */
export function isGone(error: unknown, signal?: AbortSignal): boolean {
  if (signal?.aborted) return false;
  const { isTemporary, reason, code } = problemOf(error);
  // Without a reason, the console said it: it has no such service.
  return isTemporary || (reason === "" && (code === Code.NotFound || code === Code.Unimplemented));
}

async function recordedRuns(project: string, signal: AbortSignal): Promise<TrainingRun[]> {
  const found: TrainingRun[] = [];
  let pageToken = "";
  for (let page = 0; page < STORE_PAGES; page++) {
    const answer = await client(RunLeaseService).listRunLeases({ project, pageSize: 1000, pageToken }, { signal });
    for (const { record } of answer.leases) {
      const run = runOfRecord(record);
      if (run) found.push(run);
    }
    pageToken = answer.nextPageToken;
    if (!pageToken) break;
  }
  return found.sort((a, b) => Number((b.createTime?.seconds ?? 0n) - (a.createTime?.seconds ?? 0n)));
}
