// All pages: their addresses, titles and places in the navigation.

import type { Component } from "svelte";

/** A page. */
export interface Route {
  /** Path without the prefix; `:name` is one segment, `:name*` the rest. */
  path: string;
  /** Title of the page; `:name` is replaced. */
  title: string;
  /** Entry in the navigation, under this heading. */
  nav?: { section: Section; text: string };
  screen: () => Promise<{ default: Screen }>;
}

/** A page's component; its props are the parts of the address that its path names. */
// eslint-disable-next-line @typescript-eslint/no-explicit-any -- props differ by page
export type Screen = Component<any>;

export const SECTIONS = ["", "Train", "Serve", "Manage"] as const;
export type Section = (typeof SECTIONS)[number];

export const routes: Route[] = [
  {
    path: "",
    title: "Home",
    screen: () => import("./screens/home/Home.svelte"),
  },
  {
    path: "projects/:project",
    title: "Home",
    nav: { section: "", text: "Home" },
    screen: () => import("./screens/home/Home.svelte"),
  },
  {
    path: "projects/:project/rollouts",
    title: "Rollouts",
    nav: { section: "", text: "Rollouts" },
    screen: () => import("./screens/rollouts/Rollouts.svelte"),
  },
  {
    path: "projects/:project/rollouts/:rollout",
    title: "Rollout :rollout",
    screen: () => import("./screens/rollout/Rollout.svelte"),
  },
  {
    path: "projects/:project/groups/:group",
    title: "Group :group",
    screen: () => import("./screens/group/Group.svelte"),
  },
  {
    path: "projects/:project/queue",
    title: "Queue and fleet",
    nav: { section: "", text: "Queue and fleet" },
    screen: () => import("./screens/queue/Queue.svelte"),
  },
  {
    path: "projects/:project/trainingRuns",
    title: "Runs",
    nav: { section: "Train", text: "Runs" },
    screen: () => import("./screens/runs/Runs.svelte"),
  },
  {
    path: "projects/:project/trainingRuns/:run",
    title: "Run :run",
    screen: () => import("./screens/run/Run.svelte"),
  },
  {
    path: "projects/:project/newRun",
    title: "New run",
    screen: () => import("./screens/runs/NewRun.svelte"),
  },
  {
    path: "projects/:project/compare",
    title: "Compare",
    nav: { section: "Train", text: "Compare" },
    screen: () => import("./screens/compare/Compare.svelte"),
  },
  {
    path: "projects/:project/prompts",
    title: "Prompts",
    nav: { section: "Train", text: "Prompts" },
    screen: () => import("./screens/prompts/Prompts.svelte"),
  },
  {
    path: "projects/:project/trainingRuns/:run/prompts",
    title: "Prompts of :run",
    screen: () => import("./screens/prompts/Search.svelte"),
  },
  {
    path: "projects/:project/data",
    title: "Data sets and labels",
    nav: { section: "Train", text: "Data and labels" },
    screen: () => import("./screens/data/Data.svelte"),
  },
  {
    path: "projects/:project/data/:resource",
    title: ":resource",
    screen: () => import("./screens/data/DataSet.svelte"),
  },
  {
    path: "projects/:project/label",
    title: "Label",
    screen: () => import("./screens/data/Label.svelte"),
  },
  {
    path: "projects/:project/exchange",
    title: "Exchange",
    nav: { section: "Train", text: "Exchange" },
    screen: () => import("./screens/exchange/Exchange.svelte"),
  },
  {
    path: "projects/:project/models",
    title: "Models and routes",
    nav: { section: "Serve", text: "Models and routes" },
    screen: () => import("./screens/models/Models.svelte"),
  },
  {
    path: "projects/:project/usage",
    title: "Usage",
    nav: { section: "Manage", text: "Usage" },
    screen: () => import("./screens/usage/Usage.svelte"),
  },
  {
    path: "projects",
    title: "Projects",
    nav: { section: "Manage", text: "Projects" },
    screen: () => import("./screens/projects/Projects.svelte"),
  },
  {
    path: "projects/:project/tokens",
    title: "Tokens",
    nav: { section: "Manage", text: "Tokens" },
    screen: () => import("./screens/tokens/Tokens.svelte"),
  },
  {
    path: "projects/:project/audit",
    title: "Audit log",
    nav: { section: "Manage", text: "Audit log" },
    screen: () => import("./screens/audit/Audit.svelte"),
  },
];
