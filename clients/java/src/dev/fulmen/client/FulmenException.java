package dev.fulmen.client;

import com.google.protobuf.InvalidProtocolBufferException;
import io.grpc.Metadata;
import io.grpc.StatusException;
import io.grpc.StatusRuntimeException;
import java.util.Map;
import stubs.google.rpc.ErrorInfo;
import stubs.google.rpc.Status;

/** A server's refusal, or a failure of gRPC; {@code reason} is empty if no server sent one. */
final class FulmenException extends RuntimeException {
  private static final Metadata.Key<byte[]> DETAILS =
      Metadata.Key.of("grpc-status-details-bin", Metadata.BINARY_BYTE_MARSHALLER);

  final String code;
  final String reason;
  final Map<String, String> metadata;

  FulmenException(String code, String reason, String message, Map<String, String> metadata) {
    super(message);
    this.code = code;
    this.reason = reason;
    this.metadata = metadata;
  }

  FulmenException(String code, String message) {
    this(code, "", message, Map.of());
  }

  /** Decodes an error; errors other than a call's have the code FAILED. */
  static FulmenException of(Throwable thrown) {
    if (thrown instanceof FulmenException known) return known;
    if (thrown instanceof StatusRuntimeException failed) return of(failed.getStatus(), failed.getTrailers());
    if (thrown instanceof StatusException failed) return of(failed.getStatus(), failed.getTrailers());
    return new FulmenException("FAILED", String.valueOf(thrown.getMessage()));
  }

  private static FulmenException of(io.grpc.Status status, Metadata trailers) {
    var info = info(trailers);
    var message = String.valueOf(status.getDescription());
    return new FulmenException(status.getCode().name(), info.getReason(), message, info.getMetadataMap());
  }

  private static ErrorInfo info(Metadata trailers) {
    try {
      var bytes = trailers == null ? null : trailers.get(DETAILS);
      if (bytes != null) {
        for (var detail : Status.parseFrom(bytes).getDetailsList()) {
          if (detail.is(ErrorInfo.class)) return detail.unpack(ErrorInfo.class);
        }
      }
    } catch (InvalidProtocolBufferException unreadable) {
      // Another server's details: only the code is known.
    }
    return ErrorInfo.getDefaultInstance();
  }

  /**
   * Returns whether no server answered, or the connection broke. gRPC may report that as INTERNAL, too; a server's
   * INTERNAL always has a reason.
   */
  boolean isUnreachable() {
    return code.equals("UNAVAILABLE") || (code.equals("INTERNAL") && reason.isEmpty());
  }

  Map<String, Object> toJson() {
    return Map.of("code", code, "reason", reason, "message", getMessage(), "metadata", metadata);
  }
}
