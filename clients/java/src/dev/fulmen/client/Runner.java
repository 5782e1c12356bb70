package dev.fulmen.client;

import com.google.protobuf.util.Durations;
import io.grpc.Context;
import io.grpc.stub.StreamObserver;
import java.net.InetAddress;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.Executors;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;
import stubs.fulmen.store.v1.AddCredits;
import stubs.fulmen.store.v1.Assignment;
import stubs.fulmen.store.v1.AttemptResult;
import stubs.fulmen.store.v1.CompletedAttempts;
import stubs.fulmen.store.v1.CompletionAck;
import stubs.fulmen.store.v1.LeaseServiceGrpc;
import stubs.fulmen.store.v1.OpenSession;
import stubs.fulmen.store.v1.ReleaseLeasesRequest;
import stubs.fulmen.store.v1.RenewSession;
import stubs.fulmen.store.v1.RunnerInfo;
import stubs.fulmen.store.v1.SessionOpened;
import stubs.fulmen.store.v1.StreamLeasesRequest;
import stubs.fulmen.store.v1.StreamLeasesResponse;

/**
 * A runner: holds the lease stream, runs the attempts that it is assigned, and reports their results. One thread owns
 * all fields; the stream and the attempts add tasks to its mailbox.
 */
final class Runner {
  private static final long RELEASE_LIMIT_S = 5;

  private final Connection store;
  private final Options options;
  private final int count;
  private final BlockingQueue<Runnable> mailbox = new LinkedBlockingQueue<>();
  private final ScheduledExecutorService clock = Executors.newSingleThreadScheduledExecutor(Runner::daemon);
  private final Map<String, Context.CancellableContext> running = new HashMap<>();
  private final Map<String, AttemptResult> unacknowledged = new HashMap<>();
  private String runner = "";
  private int handled; // attempts that are acknowledged or lost
  private int credits; // granted and not yet used by an assignment

  // Fields of the current stream.
  private StreamObserver<StreamLeasesRequest> requests; // null: results are sent on the next stream
  private boolean over;
  private Throwable failure;
  private long renewalNs;
  private long renewAtNs;

  Runner(Connection store, Options options) {
    this.store = store;
    this.options = options;
    count = options.number("count");
  }

  /**
   * Works until {@code count} attempts are handled. The session outlives its streams: leases survive a reconnect.
   */
  void run() throws Exception {
    try {
      while (handled < count) store.whileUnavailable(this::holdStream);
    } finally {
      running.values().forEach(attempt -> attempt.cancel(null));
      endSession();
    }
  }

  private Void holdStream() throws Exception {
    over = false;
    failure = null;
    renewalNs = TimeUnit.HOURS.toNanos(1); // until the store has sent the duration of a lease
    renewAtNs = System.nanoTime() + renewalNs;
    requests = store.own(LeaseServiceGrpc.newStub(store.store())).streamLeases(new Listener());
    open();
    while (!over) { // the stream ends at its deadline at the latest
      var work = mailbox.poll(renewAtNs - System.nanoTime(), TimeUnit.NANOSECONDS);
      if (work != null) work.run();
      if (requests == null || over) continue;
      if (handled >= count) {
        leave();
      } else {
        grant();
        if (System.nanoTime() >= renewAtNs) renew();
      }
    }
    requests = null;
    if (failure == null) return null;
    var error = FulmenException.of(failure);
    if (!error.reason.equals("SESSION_ENDED")) throw error;
    forgetSession();
    return null;
  }

  private final class Listener implements StreamObserver<StreamLeasesResponse> {
    @Override
    public void onNext(StreamLeasesResponse message) {
      mailbox.add(() -> take(message));
    }

    @Override
    public void onError(Throwable thrown) {
      mailbox.add(() -> end(thrown));
    }

    @Override
    public void onCompleted() {
      mailbox.add(() -> end(null));
    }
  }

  private void take(StreamLeasesResponse message) {
    switch (message.getMessageCase()) {
      case OPENED -> opened(message.getOpened());
      case ASSIGN -> message.getAssign().getAssignmentsList().forEach(this::start);
      case ACK -> message.getAck().getAcksList().forEach(this::acknowledge);
      case CANCEL -> cancel(message.getCancel().getAttemptsList());
      case LEASE_LOST -> lose(message.getLeaseLost().getAttemptsList());
      case DRAIN -> {
        Main.emit(Map.of("event", "drain"));
        leave();
      }
      default -> {} // a message of a newer server
    }
  }

  private void end(Throwable thrown) {
    over = true;
    failure = thrown;
  }

  /** Closes this side; the store answers by closing its own. */
  private void leave() {
    if (requests == null) return;
    requests.onCompleted();
    requests = null;
    renewAtNs = System.nanoTime() + TimeUnit.HOURS.toNanos(1); // nothing left to renew
  }

  private void open() {
    var info =
        RunnerInfo.newBuilder()
            .setHost(host())
            .setVersion("java")
            .putAllLabels(options.labels())
            .setSlotCount(options.number("slots"));
    var open =
        OpenSession.newBuilder()
            .setRunner(runner)
            .setInfo(info)
            .addAllRunningAttempts(running.keySet())
            .addAllRunningAttempts(unacknowledged.keySet())
            .addProjects(options.text("project"));
    credits = 0; // credits do not survive a stream
    requests.onNext(StreamLeasesRequest.newBuilder().setOpen(open).build());
  }

  private void opened(SessionOpened opened) {
    var ttlNs = Durations.toNanos(opened.getLeaseTtl());
    var id = opened.getRunner();
    Main.emit(Map.of("event", "opened", "runner", id, "resumed", id.equals(runner), "lease_ttl_s", ttlNs / 1e9));
    runner = id;
    lose(opened.getLostAttemptsList());
    renewalNs = ttlNs / 3;
    renewAtNs = System.nanoTime() + renewalNs;
    unacknowledged.values().forEach(this::report);
  }

  private void renew() {
    renewAtNs = System.nanoTime() + renewalNs;
    requests.onNext(StreamLeasesRequest.newBuilder().setRenew(RenewSession.getDefaultInstance()).build());
  }

  /** Grants credits for places that are free, and never for more attempts than are still wanted. */
  private void grant() {
    var held = running.size() + unacknowledged.size();
    var free = Math.min(options.number("slots"), count - handled) - held - credits;
    if (free <= 0) return;
    credits += free;
    requests.onNext(StreamLeasesRequest.newBuilder().setAddCredits(AddCredits.newBuilder().setCreditCount(free)).build());
  }

  private void start(Assignment assignment) {
    var timeoutMs = Durations.toMillis(assignment.getTimeout());
    var context = Context.current().withDeadlineAfter(timeoutMs, TimeUnit.MILLISECONDS, clock);
    credits--;
    running.put(assignment.getAttempt(), context);
    Main.emit(Map.of("event", "assigned", "attempt", assignment.getAttempt()));
    var agent = new Agent(store, assignment, options, context);
    daemon(
            context.wrap(
                () -> {
                  var result = agent.attempted();
                  mailbox.add(() -> finish(context, result));
                }))
        .start();
  }

  private void finish(Context.CancellableContext context, AttemptResult result) {
    var wanted = running.remove(result.getAttempt(), context); // else it was lost meanwhile: the result is discarded
    context.cancel(null);
    if (!wanted) return;
    unacknowledged.put(result.getAttempt(), result);
    if (requests != null) report(result);
  }

  private void report(AttemptResult result) {
    var complete = CompletedAttempts.newBuilder().addResults(result);
    requests.onNext(StreamLeasesRequest.newBuilder().setComplete(complete).build());
  }

  private void acknowledge(CompletionAck ack) {
    if (unacknowledged.remove(ack.getAttempt()) == null) return;
    handled++;
    Main.emit(
        Map.of(
            "event", "acknowledged",
            "attempt", ack.getAttempt(),
            "status", ack.getStatus().name(),
            "message", ack.getMessage()));
  }

  /** Stops attempts whose rollouts were cancelled; each ends as CANCELLED and is reported like any other. */
  private void cancel(List<String> attempts) {
    for (var attempt : attempts) {
      if (!running.containsKey(attempt)) continue;
      Main.emit(Map.of("event", "cancel", "attempt", attempt));
      running.get(attempt).cancel(null);
    }
  }

  /** Forgets attempts whose leases have expired: the store would discard their results. */
  private void lose(List<String> attempts) {
    for (var attempt : attempts) {
      var context = running.remove(attempt);
      if (context != null) context.cancel(null);
      if (context == null && unacknowledged.remove(attempt) == null) continue;
      handled++;
      Main.emit(Map.of("event", "lease_lost", "attempt", attempt));
    }
  }

  private void forgetSession() {
    Main.emit(Map.of("event", "session_ended", "runner", runner));
    var stopped = new ArrayList<>(running.values());
    running.clear();
    unacknowledged.clear();
    runner = "";
    stopped.forEach(context -> context.cancel(null));
  }

  /** Releases the remaining leases, so that rollouts need not wait until the session expires. */
  private void endSession() {
    if (runner.isEmpty()) return;
    var leases = store.own(LeaseServiceGrpc.newBlockingStub(store.store()));
    try {
      leases
          .withDeadlineAfter(RELEASE_LIMIT_S, TimeUnit.SECONDS)
          .releaseLeases(ReleaseLeasesRequest.newBuilder().setRunner(runner).build());
    } catch (io.grpc.StatusRuntimeException unreachable) {
      // The session expires later.
    }
  }

  private static String host() {
    try {
      return InetAddress.getLocalHost().getHostName();
    } catch (java.net.UnknownHostException nameless) {
      return "java";
    }
  }

  private static Thread daemon(Runnable work) {
    var thread = new Thread(work);
    thread.setDaemon(true);
    return thread;
  }
}
