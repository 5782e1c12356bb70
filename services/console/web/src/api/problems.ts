// Errors of calls, in words for the person who looks at the page: what did not work, why, and what to do.
//
// All errors that reach a page come through `problemOf`. What operators need is kept beside the sentence, as `technical`.

import { Code, ConnectError } from "@connectrpc/connect";

import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "./gen/google/rpc/error_details_pb";
import { capitalized, inWords, permissionWords, plain, serviceWords } from "./sentences";

/** What a person reads about something that failed. */
export interface Problem {
  /** Sentences: what failed, why, what to do. */
  message: string;
  /** One sentence per problem of the request. */
  details: string[];
  /** The same as the service wrote them, `field: description`. */
  violations: string[];
  /** For operators: rpc, code, reason, ids and the message of the service, one per line; empty where there is none. */
  technical: string;
  /** Reason of `google.rpc.ErrorInfo`, such as `ROLLOUT_NOT_FOUND`; empty where no service said one. */
  reason: string;
  code: Code;
  /** True if the same call may succeed later. */
  isTemporary: boolean;
}

/** What follows a failure: the page tries again by itself, a person may, or something may have been changed. */
export type Next = "retried" | "again" | "changed";

/** An error of the page itself. Its message is shown as it is. */
export class PageError extends Error {}

const TEMPORARY = new Set([Code.Unavailable, Code.DeadlineExceeded, Code.ResourceExhausted, Code.Aborted]);
const REMEDY: Record<Next, string> = {
  retried: "The page tries again every few seconds.",
  again: "Try again in a moment.",
  changed: "Try again in a moment.",
};
const MAYBE_DONE = "It may have been done all the same: look before you try again.";

/** Why a service does not answer, where it says so itself. */
const WHY_UNAVAILABLE: Record<string, string> = {
  DRAINING: "is restarting",
  DATABASE_UNAVAILABLE: "cannot reach its database",
  BLOB_STORAGE_UNAVAILABLE: "cannot reach the storage of large contents",
  RUN_STORAGE_UNAVAILABLE: "cannot write to the storage of training runs",
};

/** What is said instead of the words of a service, which are for programs. */
const OWN_WORDS: Record<string, string> = {
  ETAG_MISMATCH: "Someone else changed this in the meantime. Reload the page and try again.",
  PROJECT_EXISTS: "A project with this name exists or existed. Choose another name.",
  MESSAGE_TOO_LARGE: "This is too large to send. Make it smaller, or use the command line.",
};

const called = new WeakMap<object, { service: string; method: string }>();

/** Remembers which rpc an error came from. */
export function rememberCall(error: unknown, service: string, method: string): void {
  if (typeof error === "object" && error !== null) called.set(error, { service, method });
}

/** Returns what to show of an error. */
export function problemOf(error: unknown, next: Next = "again"): Problem {
  if (error instanceof PageError) return ofPage(error.message, "");
  const known = ConnectError.from(error);
  const isBroken = isBrokenConnection(error, known);
  if (!(error instanceof ConnectError) && !isBroken)
    return ofPage(
      "Something went wrong on this page. Reload it; if that does not help, contact its operator.",
      String(error),
    );
  const code = isBroken ? Code.Unavailable : known.code;
  const info = known.findDetails(ErrorInfoSchema)[0];
  const reason = info?.reason ?? "";
  const violations = known
    .findDetails(BadRequestSchema)
    .flatMap(({ fieldViolations }) => fieldViolations.map((each) => `${each.field}: ${each.description}`));
  const failure: Failure = {
    code,
    reason,
    violations,
    said: known.rawMessage,
    isBroken,
    retryS: Number(known.findDetails(RetryInfoSchema)[0]?.retryDelay?.seconds ?? 0n),
    role: info?.metadata.role ?? "",
    ...(called.get(known) ?? { service: "", method: "" }),
  };
  return {
    message: sentences(failure, next),
    details: isAddress(failure) ? [] : violations.map(inWords),
    violations,
    technical: technicalOf(failure, { ...info?.metadata, "request id": known.metadata.get("x-request-id") ?? "" }),
    reason,
    code,
    isTemporary: TEMPORARY.has(code),
  };
}

/** True if the session has ended, or there was none. */
export function signedOut(error: unknown): boolean {
  return error instanceof ConnectError && error.code === Code.Unauthenticated;
}

/** True if a call was ended by the page itself. */
export function wasAborted(error: unknown): boolean {
  return (
    (error instanceof ConnectError && error.code === Code.Canceled) ||
    (error instanceof DOMException && error.name === "AbortError")
  );
}

interface Failure {
  code: Code;
  reason: string;
  violations: string[];
  /** The message of the service, or of what stands between it and the page. */
  said: string;
  isBroken: boolean;
  retryS: number;
  role: string;
  service: string;
  method: string;
}

function sentences(failure: Failure, next: Next): string {
  const { code, reason, said, isBroken, retryS } = failure;
  const who = serviceWords(failure.service);
  const isCut = next === "changed" ? MAYBE_DONE : REMEDY[next];
  if (isBroken) return `The console cannot be reached. ${isCut}`;
  if (OWN_WORDS[reason]) return OWN_WORDS[reason];
  // Said by something between the console and the browser.
  if (/^HTTP \d+$/.test(said)) return ofProxy(said, isCut);
  switch (code) {
    case Code.Unavailable:
      if (WHY_UNAVAILABLE[reason]) return `${who} ${WHY_UNAVAILABLE[reason]}. ${REMEDY[next]}`;
      return reason && reason !== "UNSPECIFIED"
        ? `${plain(said)} ${REMEDY[next]}`
        : `${who} does not answer. ${REMEDY[next]}`;
    case Code.DeadlineExceeded:
      return `${who} did not answer in time. ${isCut}`;
    case Code.ResourceExhausted:
      return retryS > 0 ? `${plain(said)} Try again in ${retryS} s.` : plain(said);
    case Code.PermissionDenied:
      return reason === "PERMISSION_DENIED" ? permissionWords(said, failure.role, failure.method) : plain(said);
    case Code.NotFound:
      if (!reason && failure.service)
        return `This console is not connected to ${who.replace("The", "the")}. Its operator can change that.`;
      return `${plain(said)} It may have been deleted, or belong to another project.`;
    case Code.InvalidArgument:
      if (isAddress(failure)) return "This address does not exist. Look whether a part of it is missing or mistyped.";
      if (!reason) return "The page is older or newer than the console. Reload it.";
      return /malformed/.test(said) ? `${who} does not accept this.` : plain(said);
    case Code.Unimplemented:
      return `${who} is of a version that cannot do this. Its operator can update it.`;
    case Code.Internal:
      if (reason === "INTERNAL" || !reason)
        return `${reason ? who : "The console"} failed at this. Its log says why; the details say where to look.`;
      return plain(said);
    default:
      return plain(said) || "This did not work, and nothing says why. Try again in a moment.";
  }
}

/** True if all that is wrong is the name of what a page shows: a mistyped address. */
function isAddress({ method, violations }: Failure): boolean {
  return (
    /^(Get|Watch)/.test(method) && violations.length > 0 && violations.every((each) => /^(name|parent): /.test(each))
  );
}

function isBrokenConnection(error: unknown, known: ConnectError): boolean {
  if (error instanceof ConnectError) return known.code === Code.Unknown && !known.details.length;
  return error instanceof TypeError && /fetch|network|load failed/i.test(error.message);
}

function ofProxy(said: string, remedy: string): string {
  const status = Number(said.slice("HTTP ".length));
  if (status >= 500)
    return `What stands between you and the console, such as a reverse proxy, does not reach it. ${remedy}`;
  if (status === 413) return OWN_WORDS.MESSAGE_TOO_LARGE!;
  if (status === 429) return "Too many calls came from here. Try again in a moment.";
  return "Something between you and the console, such as a reverse proxy, refused the call. Ask its operator.";
}

function ofPage(message: string, technical: string): Problem {
  const code = Code.FailedPrecondition;
  return { message, details: [], violations: [], technical, reason: "", code, isTemporary: false };
}

function technicalOf(failure: Failure, metadata: Record<string, string>): string {
  const lines = {
    rpc: failure.service && `${failure.service}/${failure.method}`,
    code: capitalized(Code[failure.code] ?? "")
      .replace(/(?<!^)(?=[A-Z])/g, "_")
      .toUpperCase(),
    reason: failure.reason,
    message: failure.said,
    ...metadata,
    time: new Date().toISOString(),
  };
  const told = Object.entries(lines).flatMap(([name, value]) =>
    value ? [`${name.replaceAll("_", " ")}: ${value}`] : [],
  );
  return [...told, ...failure.violations].join("\n");
}
