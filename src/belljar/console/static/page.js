// What every page has: keys, clocks, the number of questions that wait, notifications about them, the tools of cells.
import { startClock } from "./clock.js";
import { startHead } from "./head.js";
import { startKeys } from "./keys.js";
import { startNotifications } from "./notify.js";
import { openStream } from "./stream.js";
import { startTables } from "./tables.js";

startClock();
startHead();
startKeys();
startNotifications();
startTables();
// Pages with a stream of their own hear of questions through it.
if (!document.body.dataset.stream) openStream("waiting", "", () => {});
