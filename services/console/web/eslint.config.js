import svelte from "eslint-plugin-svelte";
import globals from "globals";
import ts from "typescript-eslint";

export default ts.config(
  { ignores: ["src/api/gen/**"] },
  ...ts.configs.recommended,
  ...svelte.configs.recommended,
  { languageOptions: { globals: globals.browser } },
  {
    files: ["**/*.svelte", "**/*.svelte.ts"],
    languageOptions: { parserOptions: { parser: ts.parser } },
    rules: {
      // Text of agents never becomes HTML.
      "svelte/no-at-html-tags": "error",
      // Parameters of addresses are replaced whole, never changed in place.
      "svelte/prefer-svelte-reactivity": "off",
      // Links are those of `shell/navigation`, which has no base of SvelteKit.
      "svelte/no-navigation-without-resolve": "off",
    },
  },
  { rules: { "max-lines": ["error", { max: 450, skipBlankLines: false }], "no-console": "error" } },
);
