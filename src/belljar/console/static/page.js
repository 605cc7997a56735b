// What every page has: keys, the number of questions that wait, and notifications about them.
import { startKeys } from "./keys.js";
import { startNotifications } from "./notify.js";
import { openStream } from "./stream.js";

startKeys();
startNotifications();
// Pages with a stream of their own hear of questions through it.
if (!document.body.dataset.stream) openStream("waiting", "", () => {});
