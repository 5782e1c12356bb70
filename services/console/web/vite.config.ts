import { svelte, vitePreprocess } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vitest/config";

export default defineConfig({
  // Addresses of files are relative: the console may be under a path prefix.
  base: "./",
  plugins: [svelte({ preprocess: vitePreprocess() })],
  build: {
    outDir: "../src/fulmen_console/page",
    emptyOutDir: true,
    target: "es2023",
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
    reportCompressedSize: false,
  },
  server: {
    // `npm run dev` beside `fulmen up`.
    proxy: Object.fromEntries(
      ["/session", "^/fulmen\\."].map((path) => [path, { target: "http://127.0.0.1:7500", changeOrigin: false }]),
    ),
  },
  test: { include: ["src/**/*.test.ts"], environment: "node" },
});
