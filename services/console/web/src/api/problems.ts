// Errors of calls, in the words of the service that refused.

import { Code, ConnectError } from "@connectrpc/connect";

import { BadRequestSchema, ErrorInfoSchema } from "./gen/google/rpc/error_details_pb";

/** What a person reads about a call that failed. */
export interface Problem {
  message: string;
  /** One line per problem of the request, as `field: description`. */
  details: string[];
  /** Reason of `google.rpc.ErrorInfo`, such as `ROLLOUT_NOT_FOUND`; empty where no service said one. */
  reason: string;
  code: Code;
  /** True if the same call may succeed later. */
  isTemporary: boolean;
}

const TEMPORARY = new Set([Code.Unavailable, Code.DeadlineExceeded, Code.ResourceExhausted, Code.Aborted]);

/** Returns what to show of an error. Anything that no service said is a broken connection. */
export function problemOf(error: unknown): Problem {
  const known = ConnectError.from(error);
  const isBroken = !(error instanceof ConnectError) || (known.code === Code.Unknown && !known.details.length);
  const code = isBroken ? Code.Unavailable : known.code;
  return {
    message: isBroken ? "The console cannot be reached." : known.rawMessage || Code[known.code] || "The call failed.",
    details: known
      .findDetails(BadRequestSchema)
      .flatMap(({ fieldViolations }) => fieldViolations.map((each) => `${each.field}: ${each.description}`)),
    reason: known.findDetails(ErrorInfoSchema)[0]?.reason ?? "",
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
