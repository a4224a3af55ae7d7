// A player stands in a frame of its own, as high as its page: it never has to be scrolled.
const fit = frame => {
  const grow = () => {
    const missing = frame.contentDocument.documentElement.scrollHeight - frame.clientHeight;
    if (missing > 0) frame.style.height = `${frame.offsetHeight + missing}px`;
  };
  new frame.contentWindow.ResizeObserver(grow).observe(frame.contentDocument.body);
};
addEventListener("DOMContentLoaded", () => {
  for (const frame of document.querySelectorAll("iframe[srcdoc]")) {
    frame.addEventListener("load", () => fit(frame));
    if (frame.contentDocument?.body?.childElementCount) fit(frame);
  }
  // Tell it when the switch for light and dark is turned.
  new MutationObserver(() => {
    const { theme } = document.body.dataset;
    for (const frame of document.querySelectorAll("iframe[srcdoc]"))
      frame.contentDocument.documentElement.style.colorScheme = theme === "auto" ? "" : theme;
  }).observe(document.body, { attributeFilter: ["data-theme"] });
});
