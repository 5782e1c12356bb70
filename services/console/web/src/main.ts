import "./styles/tokens.css";
import "./styles/base.css";

import { mount } from "svelte";

import { session } from "./api/session.svelte";
import App from "./shell/App.svelte";

const target = document.getElementById("app");
if (!target) throw new Error("index.html has no #app");
mount(App, { target });
void session.begin();
