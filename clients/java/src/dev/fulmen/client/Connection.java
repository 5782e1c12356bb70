package dev.fulmen.client;

import io.grpc.CallCredentials;
import io.grpc.ChannelCredentials;
import io.grpc.Deadline;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.TlsChannelCredentials;
import io.grpc.stub.AbstractStub;
import java.io.File;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.concurrent.Callable;
import java.util.concurrent.Executor;
import java.util.concurrent.TimeUnit;

/** Channels to the store and the LLM proxy, with their addresses, credentials and deadline. */
final class Connection implements AutoCloseable {
  private static final long PAUSE_MS = 200;

  final Deadline deadline;
  private final ManagedChannel store;
  private final ManagedChannel proxy;
  private final String token;

  /**
   * Opens channels to the addresses in the environment; nothing is sent before the first call. All calls end at the
   * deadline.
   */
  Connection(Deadline deadline) throws IOException {
    this.deadline = deadline;
    token = ownToken();
    var security = security();
    store = Grpc.newChannelBuilder(environment("FULMEN_STORE_TARGET", "127.0.0.1:7101"), security).build();
    proxy = Grpc.newChannelBuilder(environment("FULMEN_LLM_PROXY_TARGET", "127.0.0.1:7201"), security).build();
  }

  ManagedChannel store() {
    return store;
  }

  ManagedChannel proxy() {
    return proxy;
  }

  /** Returns a stub that calls with the program's own token. */
  <S extends AbstractStub<S>> S own(S stub) {
    return as(token, stub);
  }

  /** Returns a stub that calls with a token or an attempt key. */
  <S extends AbstractStub<S>> S as(String key, S stub) {
    return stub.withDeadline(deadline).withCallCredentials(new Bearer(key));
  }

  @Override
  public void close() {
    store.shutdownNow();
    proxy.shutdownNow();
  }

  /** Repeats an operation while the server cannot be reached: the only error that may be retried unchanged. */
  void whileUnavailable(Callable<Void> work) throws Exception {
    for (; ; ) {
      try {
        work.call();
        return;
      } catch (Exception cause) {
        var error = FulmenException.of(cause);
        if (!error.isUnreachable() || deadline.timeRemaining(TimeUnit.MILLISECONDS) <= PAUSE_MS) throw error;
        Thread.sleep(PAUSE_MS);
        store.resetConnectBackoff(); // connects immediately to a restarted server
      }
    }
  }

  private static String ownToken() throws IOException {
    var file = environment("FULMEN_TOKEN_FILE", "");
    var token = environment("FULMEN_TOKEN", "");
    return token.isEmpty() && !file.isEmpty() ? Files.readString(Path.of(file)).strip() : token;
  }

  private static ChannelCredentials security() throws IOException {
    var authority = environment("FULMEN_TLS_CA_FILE", "");
    var certificate = environment("FULMEN_TLS_CERTIFICATE_FILE", "");
    if (authority.isEmpty()) return InsecureChannelCredentials.create();
    var tls = TlsChannelCredentials.newBuilder().trustManager(new File(authority));
    if (!certificate.isEmpty()) tls.keyManager(new File(certificate), new File(environment("FULMEN_TLS_KEY_FILE", "")));
    return tls.build();
  }

  private static String environment(String name, String otherwise) {
    var value = System.getenv(name);
    return value == null || value.isEmpty() ? otherwise : value;
  }

  private static final class Bearer extends CallCredentials {
    private static final Metadata.Key<String> AUTHORIZATION =
        Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);

    private final Metadata headers = new Metadata();

    Bearer(String key) {
      headers.put(AUTHORIZATION, "Bearer " + key);
    }

    @Override
    public void applyRequestMetadata(RequestInfo call, Executor executor, MetadataApplier applier) {
      applier.apply(headers);
    }

    @Override
    public void thisUsesUnstableApi() {}
  }
}
