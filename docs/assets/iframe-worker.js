/* Browsers start no worker from a file on the disk. There the search runs in a hidden frame instead. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow;
      this.waiting = [];
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inner.importScripts = (...all) => all.reduce((before, one) => before.then(() => this.load(inner, one)), Promise.resolve());
      this.load(inner, address).then(() => {
        this.inner = inner;
        this.waiting.splice(0).forEach((data) => this.postMessage(data));
      });
    }

    load(inner, address) {
      return new Promise((done, failed) => {
        const script = inner.document.createElement("script");
        Object.assign(script, { src: address, onload: done, onerror: failed });
        inner.document.head.append(script);
      });
    }

    postMessage(data) {
      if (this.inner) this.inner.dispatchEvent(new this.inner.MessageEvent("message", { data }));
      else this.waiting.push(data);
    }

    terminate() {}
  };
}
