// The whole output of one execution, a page of lines at a time.
import { startKeys } from "./keys.js";

startKeys();
