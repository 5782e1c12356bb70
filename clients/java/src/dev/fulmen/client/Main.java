package dev.fulmen.client;

import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import io.grpc.Deadline;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Map;
import java.util.concurrent.TimeUnit;

/**
 * A client of Fulmen in one program: {@code client COMMAND [--flag value]...}. docs/clients.md explains commands and
 * flags.
 *
 * <p>Prints one JSON object per line. Errors are printed to stderr, with the exit status 1 (2: invalid command line).
 */
public final class Main {
  static final Gson JSON = new GsonBuilder().disableHtmlEscaping().create();

  public static void main(String[] arguments) {
    System.exit(status(arguments));
  }

  private static int status(String[] arguments) {
    Options options;
    try {
      options = Options.read(arguments);
    } catch (IllegalArgumentException wrong) {
      return failed(2, new FulmenException("USAGE", wrong.getMessage()));
    }
    try {
      perform(options);
      return 0;
    } catch (Exception cause) {
      return failed(1, FulmenException.of(cause));
    }
  }

  private static void perform(Options options) throws Exception {
    if (options.command().equals("vectors")) {
      for (var file : options.files()) emit(Vectors.check(Files.readString(Path.of(file))));
      return;
    }
    var deadline = Deadline.after(options.milliseconds("deadline-s"), TimeUnit.MILLISECONDS);
    try (var store = new Connection(deadline)) {
      switch (options.command()) {
        case "create" -> Feed.create(store, options);
        case "watch" -> Feed.watch(store, options);
        default -> new Runner(store, options).run();
      }
    }
  }

  static void emit(Map<String, ?> event) {
    System.out.println(JSON.toJson(event));
  }

  private static int failed(int status, FulmenException error) {
    System.err.println(JSON.toJson(Map.of("error", error.toJson())));
    return status;
  }
}
