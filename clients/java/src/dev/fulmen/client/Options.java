package dev.fulmen.client;

import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** The command line: a command, flags with values, files. */
record Options(String command, List<String> files, Map<String, String> flags) {
  private static final Map<String, String> DEFAULTS =
      Map.ofEntries(
          Map.entry("project", "projects/default"),
          Map.entry("training-run", ""),
          Map.entry("group-id", ""),
          Map.entry("request-id", ""),
          Map.entry("label", ""),
          Map.entry("input", "{\"question\": \"6*7=\"}"),
          Map.entry("cursor", ""),
          Map.entry("count", "1"),
          Map.entry("slots", "1"),
          Map.entry("model", ""),
          Map.entry("work-s", "0"),
          Map.entry("deadline-s", "60"));

  /** Reads arguments; throws IllegalArgumentException if they are invalid. */
  static Options read(String[] arguments) {
    var words = List.of(arguments);
    if (words.isEmpty() || !List.of("create", "run", "watch", "vectors").contains(words.get(0))) {
      throw new IllegalArgumentException("unknown command: " + String.join(" ", words));
    }
    var flags = new LinkedHashMap<>(DEFAULTS);
    var files = new ArrayList<String>();
    for (int i = 1; i < words.size(); i++) {
      if (!words.get(i).startsWith("--")) {
        files.add(words.get(i));
        continue;
      }
      var flag = words.get(i).substring(2);
      if (!flags.containsKey(flag) || i + 1 == words.size()) {
        throw new IllegalArgumentException("unknown flag: " + flag);
      }
      flags.put(flag, words.get(++i));
    }
    for (var number : List.of("count", "slots", "work-s", "deadline-s")) Double.parseDouble(flags.get(number));
    return new Options(words.get(0), files, flags);
  }

  String text(String flag) {
    return flags.get(flag);
  }

  /** Returns labels that rollouts require of a runner, or that a runner has. */
  Map<String, String> labels() {
    var parts = text("label").split("=", 2);
    return parts.length == 2 ? Map.of(parts[0], parts[1]) : Map.of();
  }

  int number(String flag) {
    return Integer.parseInt(flags.get(flag));
  }

  long milliseconds(String flag) {
    return Math.round(Double.parseDouble(flags.get(flag)) * 1000);
  }
}
