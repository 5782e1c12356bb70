// Scores an answer: reads {"task": ..., "outcome": ...} from standard input and prints the reward as its last line.
import { readFileSync } from "node:fs";

const { task, outcome } = JSON.parse(readFileSync(0, "utf8"));
console.log(outcome.trim() === task.answer ? 1 : 0);
