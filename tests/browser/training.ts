// Real trainings for browser tests.

import { execFile } from "node:child_process";
import { cp, mkdtemp } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { promisify } from "node:util";
import { fileURLToPath } from "node:url";

import { call, stack } from "./console";

const ROOT = fileURLToPath(new URL("../..", import.meta.url));

/** Longest training of a test. */
export const LIMIT_MS = 240_000;

/** Returns the runs of the project, newest first. */
export async function runs(): Promise<any[]> {
  const request = { project: "projects/default" };
  return (await call("fulmen.algorithm.v1.TrainingRunService/ListTrainingRuns", request)).trainingRuns ?? [];
}

/** Copies an example, lets `change` make it small, and trains it to its end. */
export async function train(example: string, change: (folder: string) => Promise<void>): Promise<void> {
  const folder = await mkdtemp(join(tmpdir(), "fulmen-train-"));
  await cp(join(ROOT, "examples", example), folder, { recursive: true });
  await change(folder);
  const python = process.env.PYTHON ?? join(ROOT, ".venv/bin/python");
  const command = ["-m", "fulmen_cli", "train", join(folder, "train.toml"), "--state-dir", stack().folder];
  await promisify(execFile)(python, command, { cwd: ROOT, timeout: LIMIT_MS });
}
