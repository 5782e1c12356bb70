// The scores of the person who labels, in the store.

import type { Client } from "@connectrpc/connect";

import { PageError } from "../../api/problems";
import type { Annotation, AnnotationService } from "../../api/gen/fulmen/store/v1/annotation_service_pb";
import type { Scores } from "./labelling";

const PAGE = 1000;
const MAX_PAGES = 20;

function present(annotation: Annotation | undefined): Annotation {
  if (!annotation) throw new PageError("The store answered without the score. Reload the page.");
  return annotation;
}

/** Writes scores of a dimension. */
export function scoresOf(service: Client<typeof AnnotationService>, dimension: string): Scores {
  return {
    create: async (rollout, value, comment) =>
      present((await service.createAnnotation({ annotation: { rollout, dimension, value, comment } })).annotation),
    update: async (name, value, comment) =>
      present((await service.updateAnnotation({ annotation: { name, value, comment } })).annotation),
    delete: async (name) => {
      await service.deleteAnnotation({ name });
    },
  };
}

/** Returns the newest scores of an author, 20,000 at most. */
export async function ownScores(
  service: Client<typeof AnnotationService>,
  of: { project: string; dimension: string; author: string },
  signal: AbortSignal,
): Promise<Annotation[]> {
  const found: Annotation[] = [];
  let pageToken = "";
  for (let page = 0; page < MAX_PAGES; page += 1) {
    const answer = await service.listAnnotations({ ...of, pageSize: PAGE, pageToken }, { signal });
    found.push(...answer.annotations);
    pageToken = answer.nextPageToken;
    if (!pageToken) break;
  }
  return found;
}
