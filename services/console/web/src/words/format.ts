// The one place for formatting. Numbers are in tabular figures; times are relative, with the absolute time on hover.

import { type Duration, type Timestamp, timestampDate } from "@bufbuild/protobuf/wkt";

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 3 });
const absolute = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });
const NOTHING = "–";

type Countable = number | bigint;

/** `1,234,567` */
export function count(value: Countable | undefined): string {
  return value === undefined || (typeof value === "number" && !Number.isFinite(value)) ? NOTHING : whole.format(value);
}

/** `1.23M` */
export function compact(value: Countable | undefined): string {
  return value === undefined || !Number.isFinite(Number(value)) ? NOTHING : short.format(value);
}

/** A measurement with three significant digits: `0.873`, `12.3`, `1.2e-7`. */
export function measure(value: number | undefined): string {
  if (value === undefined || Number.isNaN(value)) return NOTHING;
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size >= 1e6) return short.format(value).replace("-", "−");
  if (size !== 0 && size < 1e-3) return value.toExponential(1).replace("-", "−").replace("e-", "e−");
  return value.toFixed(size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : 3).replace("-", "−");
}

/** `87.3 %` of a share. */
export function percent(share: number | undefined): string {
  return share === undefined || !Number.isFinite(share)
    ? NOTHING
    : `${(share * 100).toFixed(share >= 0.9995 || share === 0 ? 0 : 1)} %`;
}

/** `3.4 MiB` */
export function bytes(value: Countable | undefined): string {
  if (value === undefined) return NOTHING;
  let size = Number(value);
  if (size < 1024) return `${size} B`;
  for (const unit of ["KiB", "MiB", "GiB", "TiB"]) {
    size /= 1024;
    if (size < 1024 || unit === "TiB") return `${size.toFixed(size < 10 ? 1 : 0)} ${unit}`;
  }
  return NOTHING;
}

/** `$0.0123`, `$12.30` */
export function dollars(value: number | undefined): string {
  if (value === undefined || !Number.isFinite(value)) return NOTHING;
  return `$${value.toFixed(value !== 0 && Math.abs(value) < 0.1 ? 4 : 2)}`;
}

/** `820 ms`, `1.2 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h` */
export function seconds(value: number | undefined): string {
  if (value === undefined || !Number.isFinite(value)) return NOTHING;
  if (value < 0) return `−${seconds(-value)}`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 59.95) return `${value < 10 ? value.toFixed(1) : Math.round(value)} s`;
  const [large, small, per] =
    value < 3599.5
      ? (["min", "s", 60] as const)
      : value < 86_400
        ? (["h", "min", 60] as const)
        : (["d", "h", 24] as const);
  const inSmall = Math.round(value / { s: 1, min: 60, h: 3600 }[small]);
  const rest = inSmall % per;
  return `${Math.floor(inSmall / per)} ${large}${rest ? ` ${rest} ${small}` : ""}`;
}

/** `just now`, `20 s ago`, `3 min ago`, `in 2 h` */
export function ago(when: Date | undefined, now: Date): string {
  if (!when) return NOTHING;
  const past = (now.getTime() - when.getTime()) / 1000;
  const size = Math.abs(past);
  if (size < 5) return "just now";
  const text =
    size < 59.5
      ? `${Math.round(size)} s`
      : size < 3570
        ? `${Math.round(size / 60)} min`
        : size < 84_600
          ? `${Math.round(size / 3600)} h`
          : `${Math.round(size / 86_400)} d`;
  return past > 0 ? `${text} ago` : `in ${text}`;
}

/** `14 Mar 2026, 09:12:03` in the person's time zone. */
export function at(when: Date | undefined): string {
  return when ? absolute.format(when) : NOTHING;
}

export function dateOf(time: Timestamp | undefined): Date | undefined {
  return time && timestampDate(time);
}

/** Seconds of a duration of the protos. */
export function secondsOf(duration: Duration | undefined): number | undefined {
  return duration && Number(duration.seconds) + duration.nanos / 1e9;
}

/** Seconds between two times; undefined if one is unknown. */
export function between(from: Timestamp | undefined, to: Timestamp | Date | undefined): number | undefined {
  const end = to instanceof Date ? to : dateOf(to);
  return from && end && (end.getTime() - timestampDate(from).getTime()) / 1000;
}

/** The id of a resource name: `abc` of `projects/default/rollouts/abc`; versions keep their resource: `policy.x v3`. */
export function shortName(name: string): string {
  const parts = name.split("/");
  const version = parts.lastIndexOf("versions");
  if (version > 0 && version === parts.length - 2) return `${parts[version - 1]} v${parts[version + 1]}`;
  return parts[parts.length - 1] ?? "";
}

/** The word of an enum value: `retry wait` of `ROLLOUT_STATE_RETRY_WAIT` and the prefix `ROLLOUT_STATE_`. */
export function enumWord(values: Record<number, string>, value: number): string {
  return (values[value] ?? `unknown ${value}`).toLowerCase().replaceAll("_", " ");
}
