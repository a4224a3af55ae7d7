// Search results show an excerpt of each page. A browser does not let a page opened from a file read its neighbours.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
