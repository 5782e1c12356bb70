// Sizes and colours stand in src/styles/tokens.css alone.
const strict = [
  "/color$/",
  "fill",
  "stroke",
  "background",
  "font-size",
  "font-family",
  "line-height",
  "font-weight",
  "/^(margin|padding)/",
  "/gap$/",
  "/radius$/",
  "box-shadow",
  "z-index",
  "transition-duration",
];

export default {
  plugins: ["stylelint-declaration-strict-value"],
  overrides: [{ files: ["**/*.svelte"], customSyntax: "postcss-html" }],
  ignoreFiles: ["src/styles/tokens.css"],
  rules: {
    "scale-unlimited/declaration-strict-value": [
      strict,
      {
        ignoreValues: [
          "0",
          "none",
          "inherit",
          "transparent",
          "currentcolor",
          "currentColor",
          "auto",
          "initial",
          "unset",
          "1",
          "-1",
        ],
        disableFix: true,
        expandShorthand: true,
        recurseLonghand: true,
      },
    ],
    "color-no-hex": true,
    "color-named": "never",
    "declaration-no-important": true,
  },
};
