// Packs the token ids and log-probabilities of an answer: what `capture/token_lists.py` does with msgspec and struct.
//
// Invariant: whatever is accepted here is accepted there, with the same bytes. Anything unusual (a field that may matter, a
// number with more than 19 digits, a float whose rounding is in doubt) is UNUSUAL, and left to Python. Nothing is allocated,
// and no library is needed, not even that of C++.

#include <stdint.h>

namespace {

constexpr int64_t UNUSUAL = -1;
constexpr int MAX_DEPTH = 32;
constexpr int MAX_DIGITS = 19;  // of a 64-bit integer
constexpr int MAX_POWER = 44;   // two exact powers of ten

constexpr double POWERS[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11,
                             1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};

struct Text {
  const char *at;
  const char *end;
};

bool is_digit(char c) { return c >= '0' && c <= '9'; }

void skip_space(Text &text) {
  while (text.at < text.end && (*text.at == ' ' || *text.at == '\n' || *text.at == '\r' || *text.at == '\t')) ++text.at;
}

bool take(Text &text, char c) {
  skip_space(text);
  if (text.at == text.end || *text.at != c) return false;
  ++text.at;
  return true;
}

bool peek(Text &text, char c) {
  skip_space(text);
  return text.at < text.end && *text.at == c;
}

bool take_word(Text &text, const char *word) {
  const char *at = text.at;
  for (; *word; ++word, ++at)
    if (at == text.end || *at != *word) return false;
  text.at = at;
  return true;
}

// Takes the digits of `\uXXXX`; half of a pair is left to Python.
bool take_code_point(Text &text) {
  if (text.end - text.at < 4) return false;
  if ((text.at[0] == 'd' || text.at[0] == 'D') && !(text.at[1] >= '0' && text.at[1] <= '7')) return false;
  for (int i = 0; i < 4; ++i) {
    const char c = *text.at++;
    if (!is_digit(c) && !(c >= 'a' && c <= 'f') && !(c >= 'A' && c <= 'F')) return false;
  }
  return true;
}

// Skips a string after its first quote.
bool skip_string(Text &text) {
  while (text.at < text.end) {
    const unsigned char c = static_cast<unsigned char>(*text.at++);
    if (c == '"') return true;
    if (c < 0x20) return false;
    if (c != '\\') continue;
    if (text.at == text.end) return false;
    switch (*text.at++) {
      case '"': case '\\': case '/': case 'b': case 'f': case 'n': case 'r': case 't': break;
      case 'u':
        if (!take_code_point(text)) return false;
        break;
      default: return false;
    }
  }
  return false;
}

// Takes a key with its colon; it has no escapes and is ASCII, so that it can be compared.
bool take_key(Text &text, const char *&key, int64_t &size) {
  if (!take(text, '"')) return false;
  key = text.at;
  while (text.at < text.end && *text.at != '"') {
    const unsigned char c = static_cast<unsigned char>(*text.at);
    if (c < 0x20 || c >= 0x80 || c == '\\') return false;
    ++text.at;
  }
  if (text.at == text.end) return false;
  size = text.at - key;
  ++text.at;
  return take(text, ':');
}

bool is_key(const char *key, int64_t size, const char *name) {
  for (int64_t i = 0; i < size; ++i)
    if (name[i] == 0 || name[i] != key[i]) return false;
  return name[size] == 0;
}

struct Number {
  uint64_t digits = 0;
  int power = 0;
  bool negative = false;
  bool whole = true;
};

// Takes a number in the grammar of JSON; fails for one with more digits than fit.
bool take_number(Text &text, Number &number) {
  int count = 0;
  number = Number();
  if (text.at < text.end && *text.at == '-') number.negative = true, ++text.at;
  if (text.at == text.end || !is_digit(*text.at)) return false;
  if (*text.at == '0') {
    ++text.at;
    if (text.at < text.end && is_digit(*text.at)) return false;
  } else {
    for (; text.at < text.end && is_digit(*text.at); ++text.at, ++count) number.digits = number.digits * 10 + (*text.at - '0');
  }
  if (count > MAX_DIGITS) return false;
  if (text.at < text.end && *text.at == '.') {
    ++text.at;
    const char *from = text.at;
    for (; text.at < text.end && is_digit(*text.at); ++text.at) {
      if (count || *text.at != '0') ++count;
      if (count > MAX_DIGITS) return false;
      number.digits = number.digits * 10 + (*text.at - '0');
      --number.power;
    }
    if (text.at == from) return false;
    number.whole = false;
  }
  if (text.at < text.end && (*text.at == 'e' || *text.at == 'E')) {
    ++text.at;
    bool down = false;
    if (text.at < text.end && (*text.at == '-' || *text.at == '+')) down = *text.at++ == '-';
    int exponent = 0;
    const char *from = text.at;
    for (; text.at < text.end && is_digit(*text.at); ++text.at) {
      exponent = exponent * 10 + (*text.at - '0');
      if (exponent > 1000) return false;
    }
    if (text.at == from) return false;
    number.power += down ? -exponent : exponent;
    number.whole = false;
  }
  return true;
}

// Rounds to a double and then to a float, as Python does. The double is known to a few units in its last place: if all of
// these round to the same float, so does the right one.
bool to_float(const Number &number, float &value) {
  double about = static_cast<double>(number.digits);
  if (number.negative && !number.digits) return false;  // the sign of zero depends on the way it is written
  if (number.power > MAX_POWER / 2 || number.power < -MAX_POWER) return false;
  if (number.power > 0) {
    about *= POWERS[number.power];
  } else {
    int left = -number.power;
    if (left > 22) about /= POWERS[22], left -= 22;
    about /= POWERS[left];
  }
  const double slack = about * (1.0 / (1LL << 50));
  const float low = static_cast<float>(about - slack), high = static_cast<float>(about + slack);
  if (low != high || high > 3.4028234e38f) return false;
  value = number.negative ? -high : high;
  return true;
}

bool skip_value(Text &text, int depth) {
  skip_space(text);
  if (text.at == text.end || depth > MAX_DEPTH) return false;
  Number number;
  const char *key;
  int64_t size;
  switch (*text.at) {
    case '"': ++text.at; return skip_string(text);
    case 'n': return take_word(text, "null");
    case 't': return take_word(text, "true");
    case 'f': return take_word(text, "false");
    case '[':
      ++text.at;
      if (take(text, ']')) return true;
      do {
        if (!skip_value(text, depth + 1)) return false;
      } while (take(text, ','));
      return take(text, ']');
    case '{':
      ++text.at;
      if (take(text, '}')) return true;
      do {
        if (!take_key(text, key, size) || !skip_value(text, depth + 1)) return false;
      } while (take(text, ','));
      return take(text, '}');
    default: return take_number(text, number) && number.power < 200 && number.power > -200;
  }
}

// Takes `{"token": ..., "logprob": -0.5, ...}`.
bool take_entry(Text &text, float &value) {
  if (!take(text, '{')) return false;
  bool found = false;
  do {
    const char *key;
    int64_t size;
    if (!take_key(text, key, size)) return false;
    if (!is_key(key, size, "logprob")) {
      if (!skip_value(text, 0)) return false;
      continue;
    }
    Number number;
    skip_space(text);
    if (found || !take_number(text, number) || !to_float(number, value)) return false;
    found = true;
  } while (take(text, ','));
  return found && take(text, '}');
}

// Takes the list of a choice's entries, or null.
bool take_content(Text &text, float *out, int64_t capacity, int64_t &count) {
  skip_space(text);
  if (take_word(text, "null")) return true;
  if (!take(text, '[')) return false;
  if (take(text, ']')) return true;
  do {
    if (count == capacity || !take_entry(text, out[count])) return false;
    ++count;
  } while (take(text, ','));
  return take(text, ']');
}

bool take_logprobs(Text &text, float *out, int64_t capacity, int64_t &count) {
  if (!take(text, '{')) return false;
  if (take(text, '}')) return true;
  bool found = false;
  do {
    const char *key;
    int64_t size;
    if (!take_key(text, key, size) || is_key(key, size, "token_logprobs")) return false;
    if (!is_key(key, size, "content")) {
      if (!skip_value(text, 0)) return false;
      continue;
    }
    if (found || !take_content(text, out, capacity, count)) return false;
    found = true;
  } while (take(text, ','));
  return take(text, '}');
}

// Takes a list of ids, or null.
bool take_ids(Text &text, int32_t *out, int64_t capacity, int64_t &count) {
  skip_space(text);
  if (take_word(text, "null")) return true;
  if (!take(text, '[')) return false;
  if (take(text, ']')) return true;
  do {
    Number number;
    skip_space(text);
    if (count == capacity || !take_number(text, number) || !number.whole || number.negative) return false;
    if (number.digits > 0x7FFFFFFF) return false;
    out[count++] = static_cast<int32_t>(number.digits);
  } while (take(text, ','));
  return take(text, ']');
}

bool is_over(Text &text) {
  skip_space(text);
  return text.at == text.end;
}

}  // namespace

extern "C" {

// Packs `[[1, 2], null, [3]]`; writes the ids and how many each piece has. Returns the number of ids, or UNUSUAL.
int64_t fulmen_pack_ids(const char *json, int64_t size, int32_t *out, int64_t capacity, int64_t *lengths, int64_t pieces) {
  Text text{json, json + size};
  int64_t count = 0;
  if (!take(text, '[')) return UNUSUAL;
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const int64_t before = count;
    if (piece && !take(text, ',')) return UNUSUAL;
    if (!take_ids(text, out, capacity, count)) return UNUSUAL;
    lengths[piece] = count - before;
  }
  return take(text, ']') && is_over(text) ? count : UNUSUAL;
}

// Packs `[{"content": [{"logprob": -0.5}]}, ...]`. Returns the number of log-probabilities, or UNUSUAL.
int64_t fulmen_pack_logprobs(const char *json, int64_t size, float *out, int64_t capacity) {
  Text text{json, json + size};
  int64_t count = 0;
  if (!take(text, '[')) return UNUSUAL;
  if (take(text, ']')) return is_over(text) ? 0 : UNUSUAL;
  do {
    if (!take_logprobs(text, out, capacity, count)) return UNUSUAL;
  } while (take(text, ','));
  return take(text, ']') && is_over(text) ? count : UNUSUAL;
}
}
