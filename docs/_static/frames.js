// A player stands in a frame of its own: tell it when the switch for light and dark is turned.
addEventListener("DOMContentLoaded", () => new MutationObserver(() => {
  const { theme } = document.body.dataset;
  for (const frame of document.querySelectorAll("iframe[srcdoc]"))
    frame.contentDocument.documentElement.style.colorScheme = theme === "auto" ? "" : theme;
}).observe(document.body, { attributeFilter: ["data-theme"] }));
