package dev.fulmen.client;

import dev.fulmen.client.Payload.Expected;
import java.util.HexFormat;
import java.util.Map;
import java.util.stream.IntStream;

/** Checks the decoder of payloads against a file of protos/testdata/exchange. */
final class Vectors {
  private record GoldenFile(String codec, int version, Map<String, Case> cases, RefusedOnes refused) {}

  private record Case(String codec, Settings settings, String way, String payload, double[][] decoded, int[] cuts, int segment) {}

  private record RefusedOnes(String codec, Settings settings, String way, int size, Map<String, String> payloads) {}

  private record Settings(int bits, int bits_up, int bits_down) {}

  private Vectors() {}

  /** Decodes everything in the file; throws at the first payload whose result differs from the file. */
  static Map<String, ?> check(String text) {
    var file = Main.JSON.fromJson(text, GoldenFile.class);
    file.cases.forEach(
        (name, each) -> {
          var size = each.cuts[each.segment + 1] - each.cuts[each.segment];
          var found = decode(file, name, each.payload, expected(file, each.codec, each.settings, each.way, size));
          if (!areEqual(found, each.decoded)) {
            throw new IllegalStateException(file.codec + ": " + name + ": the elements differ from the file");
          }
        });
    var refused = file.refused;
    var expected = expected(file, refused.codec, refused.settings, refused.way, refused.size);
    refused.payloads.forEach(
        (why, payload) -> {
          if (!isRefused(payload, expected)) throw new IllegalStateException(file.codec + ": not refused: " + why);
        });
    return Map.of("codec", file.codec, "decoded", file.cases.size(), "refused", refused.payloads.size());
  }

  private static Expected expected(GoldenFile file, String codec, Settings settings, String way, int size) {
    var bits = way.equals("up") ? settings.bits_up : settings.bits_down;
    return new Expected(codec, file.version, size, settings.bits > 0 ? settings.bits : bits);
  }

  private static float[] decode(GoldenFile file, String name, String payload, Expected expected) {
    try {
      return Payload.decode(HexFormat.of().parseHex(payload), expected);
    } catch (Payload.Refused refused) {
      throw new IllegalStateException(file.codec + ": " + name + ": " + refused.getMessage());
    }
  }

  private static boolean isRefused(String payload, Expected expected) {
    try {
      Payload.decode(HexFormat.of().parseHex(payload), expected);
      return false;
    } catch (Payload.Refused refused) {
      return true;
    }
  }

  private static boolean areEqual(float[] found, double[][] decoded) {
    var elements = new double[found.length];
    for (var one : decoded) elements[(int) one[0]] = one[1];
    return IntStream.range(0, found.length).allMatch(i -> found[i] == elements[i]);
  }
}
