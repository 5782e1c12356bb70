// Errors of Fulmen's servers, with the reason from `google.rpc.ErrorInfo`.

import { status, type ServiceError } from "@grpc/grpc-js";

import { ErrorInfo } from "../build/gen/google/rpc/error_details.js";
import { Status } from "../build/gen/google/rpc/status.js";

/** A server's refusal, or a failure of gRPC. `reason` is empty if no server sent one. */
export class FulmenError extends Error {
  constructor(
    readonly code: string,
    message: string,
    readonly reason = "",
    readonly metadata: Record<string, string> = {},
  ) {
    super(message);
  }

  /** True if no server answered, or the connection broke: INTERNAL without a reason is gRPC's own. */
  get unreachable() {
    return this.code === "UNAVAILABLE" || (this.code === "INTERNAL" && !this.reason);
  }

  toJSON() {
    const { code, reason, message, metadata } = this;
    return { code, reason, message, metadata };
  }
}

/** Decodes a call's error; other errors are returned unchanged. */
export function decoded(error: unknown): unknown {
  const { code, details, metadata } = error as ServiceError;
  if (error instanceof FulmenError || typeof code !== "number") return error;
  const [trailer] = metadata?.get("grpc-status-details-bin") ?? [];
  const found = trailer instanceof Buffer ? Status.decode(trailer).details : [];
  const info = found.find(({ typeUrl }) => typeUrl.endsWith("/google.rpc.ErrorInfo"));
  const { reason, metadata: about } = ErrorInfo.decode(info?.value ?? Buffer.alloc(0));
  return new FulmenError(status[code], details, reason, about);
}
